/// Receipts of GradScalerKwargs and of schedules.
//
// settings: GradScalerKwargs

#include "optim/receipts.hpp"

#include <cmath>

#include "optim/counts.hpp"
#include "utils/run_counts.hpp"

namespace accelerate::receipts {
namespace {

using optim::OptimCount;
using Scaling = GradScalerKwargs;

constexpr const char* kScaled = "with mixed_precision fp16";

std::optional<Deed> no_scaling(const ScalingFacts& f) {
  if (f.precision != PrecisionType::FP16)
    return nothing("mixed_precision is {}, where losses are not scaled", to_string(f.precision));
  if (!f.given.enabled) return nothing("GradScalerKwargs.enabled is false");
  if (read(RunCount::backwards) == 0 || !f.loss_scale) return not_due("nothing was trained");
  return std::nullopt;
}

/// How often the scale grew: it is init_scale * growth_factor^growths * backoff_factor^skipped.
int64_t growths(const ScalingFacts& f) {
  const double left = std::log(*f.loss_scale / f.given.init_scale) -
                      static_cast<double>(read(OptimCount::steps_skipped)) * std::log(f.given.backoff_factor);
  return std::lround(left / std::log(f.given.growth_factor));
}

Deed init_scale(const ScalingFacts& f) {
  if (const auto none = no_scaling(f)) return *none;
  return acted("{} scaled, first by {}, at last by {}", counted(read(RunCount::backwards), "loss was", "losses were"),
               f.given.init_scale, *f.loss_scale);
}
Deed growth(const ScalingFacts& f) {
  if (const auto none = no_scaling(f)) return *none;
  if (const int64_t n = growths(f); n > 0)
    return acted("the scale grew {}, to {}", counted(n, "time", "times"), *f.loss_scale);
  return not_due("no {} steps in a row without an overflow yet", f.given.growth_interval);
}
Deed backoff(const ScalingFacts& f) {
  if (const auto none = no_scaling(f)) return *none;
  if (read(OptimCount::steps_skipped) == 0) return not_due("no gradient overflowed");
  return acted("{} skipped, each with a smaller scale after it; it is {}",
               counted(read(OptimCount::steps_skipped), "step was", "steps were"), *f.loss_scale);
}
Deed scaling_enabled(const ScalingFacts& f) {
  if (f.precision != PrecisionType::FP16)
    return nothing("mixed_precision is {}, where losses are not scaled", to_string(f.precision));
  if (read(RunCount::backwards) == 0) return not_due("nothing was trained");
  return f.given.enabled ? init_scale(f)
                         : acted("{} not scaled", counted(read(RunCount::backwards), "loss was", "losses were"));
}

Deed step_scheduler_with_optimizer(const SchedulesFacts& f) {
  if (f.schedulers == 0) return nothing("no schedule was prepared");
  if (const int64_t alone = read(OptimCount::schedule_steps_alone); alone > 0)
    return acted("schedules made {} of their own", counted(alone, "step", "steps"));
  if (read(OptimCount::schedule_steps) == 0) return not_due("no schedule made a step");
  return acted("schedules made {} after {} of optimizers", counted(read(OptimCount::schedule_steps), "step", "steps"),
               counted(read(OptimCount::optimizer_steps), "step", "steps"));
}

constexpr ReceiptRow<ScalingFacts> kScalingRows[] = {
    {"GradScalerKwargs.init_scale", nullptr, kScaled, asked<&ScalingFacts::given, &Scaling::init_scale>, init_scale},
    {"GradScalerKwargs.growth_factor", nullptr, kScaled, asked<&ScalingFacts::given, &Scaling::growth_factor>, growth},
    {"GradScalerKwargs.backoff_factor", nullptr, "when a gradient overflows",
     asked<&ScalingFacts::given, &Scaling::backoff_factor>, backoff},
    {"GradScalerKwargs.growth_interval", nullptr, kScaled, asked<&ScalingFacts::given, &Scaling::growth_interval>,
     growth},
    {"GradScalerKwargs.enabled", nullptr, kScaled, asked<&ScalingFacts::given, &Scaling::enabled>, scaling_enabled},
};

constexpr ReceiptRow<SchedulesFacts> kSchedulesRows[] = {
    {"step_scheduler_with_optimizer", nullptr, "in prepared schedules",
     asked<&SchedulesFacts::step_scheduler_with_optimizer>, step_scheduler_with_optimizer},
};

}  // namespace

std::vector<Receipt> of_scaling(const ScalingFacts& facts) { return made(kScalingRows, facts); }
Deed of_steps_ahead() {
  const int64_t computed = read(OptimCount::steps_ahead);
  if (computed == 0)
    return not_due("no backward of a step that synchronises gave a prepared optimizer gradients after its first step");
  return acted("{} computed within backward, in {}; step() took over {}",
               counted(computed, "parameter's new values were", "parameters' new values were"),
               bytes(read(OptimCount::ahead_bytes)), read(OptimCount::steps_taken_over));
}

Deed of_steps_at_once() {
  const int64_t stepped = read(OptimCount::steps_at_once);
  if (stepped == 0) return not_due("no backward of a step that synchronises gave a prepared optimizer gradients");
  return acted("{} within backward", counted(stepped, "parameter was stepped on", "parameters were stepped on"));
}

std::vector<Receipt> of_schedules(const SchedulesFacts& facts) { return made(kSchedulesRows, facts); }

}  // namespace accelerate::receipts
