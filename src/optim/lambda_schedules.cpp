#include <algorithm>
#include <cmath>
#include <numbers>

#include "accelerate/optim/schedules.hpp"
#include "optim/ivalue_access.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {
namespace {

/// Base rate times a function of the step.
class LambdaLR : public LRScheduler {
 public:
  LambdaLR(torch::optim::Optimizer& optimizer, std::vector<LambdaFactor> factors)
      : LRScheduler(optimizer), factors_(std::move(factors)) {
    if (factors_.size() != base_lrs_.size())
      raise<ConfigError>(
          "lambda_lr: found {} functions for {} parameter groups, expected one for each (or a single function for "
          "all).",
          factors_.size(), base_lrs_.size());
  }

  c10::IValue state_dict() const override {
    auto state = LRScheduler::state_dict().toGenericDict();
    // Python's LambdaLR keeps a place per function here and insists on finding the key.
    state.insert("lr_lambdas", make_list(std::vector<c10::IValue>(factors_.size())));
    return state;
  }

 protected:
  std::vector<double> compute_lrs() override {
    std::vector<double> lrs;
    for (size_t i = 0; i < factors_.size(); ++i) lrs.push_back(base_lrs_[i] * factors_[i](last_epoch_));
    return lrs;
  }

 private:
  std::vector<LambdaFactor> factors_;
};

/// n / max(1, of), as doubles.
double share(int64_t n, int64_t of) { return static_cast<double>(n) / static_cast<double>(std::max<int64_t>(1, of)); }

/// Linear warm-up from 0 to 1, then `after(step)`.
template <class After> Scheduler warmup_then(torch::optim::Optimizer& optimizer, int64_t warmup_steps, After after) {
  return lambda_lr(optimizer, [warmup_steps, after](int64_t step) {
    return step < warmup_steps ? share(step, warmup_steps) : after(step);
  });
}

}  // namespace

Scheduler lambda_lr(torch::optim::Optimizer& optimizer, std::vector<LambdaFactor> factors) {
  return Scheduler(std::make_shared<LambdaLR>(optimizer, std::move(factors)));
}

Scheduler lambda_lr(torch::optim::Optimizer& optimizer, const LambdaFactor& factor) {
  return lambda_lr(optimizer, std::vector<LambdaFactor>(optimizer.param_groups().size(), factor));
}

Scheduler constant_schedule(torch::optim::Optimizer& optimizer) {
  return lambda_lr(optimizer, [](int64_t) { return 1.0; });
}

Scheduler constant_schedule_with_warmup(torch::optim::Optimizer& optimizer, int64_t warmup_steps) {
  return warmup_then(optimizer, warmup_steps, [](int64_t) { return 1.0; });
}

Scheduler linear_schedule_with_warmup(torch::optim::Optimizer& optimizer, int64_t warmup_steps, int64_t total_steps) {
  return warmup_then(optimizer, warmup_steps, [=](int64_t step) {
    return std::max(0.0, share(total_steps - step, total_steps - warmup_steps));
  });
}

Scheduler cosine_schedule_with_warmup(torch::optim::Optimizer& optimizer, int64_t warmup_steps, int64_t total_steps,
                                      double num_cycles) {
  return warmup_then(optimizer, warmup_steps, [=](int64_t step) {
    const double progress = share(step - warmup_steps, total_steps - warmup_steps);
    return std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * num_cycles * 2.0 * progress)));
  });
}

Scheduler cosine_with_hard_restarts_schedule_with_warmup(torch::optim::Optimizer& optimizer, int64_t warmup_steps,
                                                         int64_t total_steps, int64_t num_cycles) {
  return warmup_then(optimizer, warmup_steps, [=](int64_t step) {
    const double progress = share(step - warmup_steps, total_steps - warmup_steps);
    if (progress >= 1.0) return 0.0;
    const double within_cycle = std::fmod(static_cast<double>(num_cycles) * progress, 1.0);
    return std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * within_cycle)));
  });
}

Scheduler polynomial_decay_schedule_with_warmup(torch::optim::Optimizer& optimizer, int64_t warmup_steps,
                                                int64_t total_steps, const PolynomialDecayOptions& options) {
  // The optimizer's default rate and not the groups' own, as in transformers.
  const double lr_init = optimizer.defaults().get_lr();
  if (!(lr_init > options.lr_end))
    raise<ConfigError>(
        "polynomial_decay_schedule_with_warmup: found lr_end {}, expected less than the optimizer's rate {}.",
        options.lr_end, lr_init);
  return warmup_then(optimizer, warmup_steps, [=](int64_t step) {
    // The second condition is where the formula below would divide 0 by 0.
    if (step > total_steps || total_steps == warmup_steps) return options.lr_end / lr_init;
    const double remaining =
        1.0 - static_cast<double>(step - warmup_steps) / static_cast<double>(total_steps - warmup_steps);
    return ((lr_init - options.lr_end) * std::pow(remaining, options.power) + options.lr_end) / lr_init;
  });
}

Scheduler inverse_sqrt_schedule(torch::optim::Optimizer& optimizer, int64_t warmup_steps,
                                std::optional<int64_t> timescale) {
  const int64_t scale = timescale.value_or(warmup_steps > 0 ? warmup_steps : 10'000);
  if (scale <= 0) raise<ConfigError>("inverse_sqrt_schedule: found timescale {}, expected at least 1.", scale);
  return warmup_then(optimizer, warmup_steps, [=](int64_t step) {
    return 1.0 / std::sqrt(static_cast<double>(step + scale - warmup_steps) / static_cast<double>(scale));
  });
}

}  // namespace accelerate::optim
