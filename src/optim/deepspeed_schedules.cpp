#include "accelerate/optim/deepspeed_schedules.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numbers>

#include "accelerate/config.hpp"
#include "optim/ivalue_access.hpp"
#include "optim/momentum.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {
namespace {

// Operations are in DeepSpeed's order, so that the last bits are, too.

using DeepSpeedVersion = std::array<int, 3>;

/// Whether what changed in DeepSpeed's `version` is not to act yet.
bool is_before(const std::string& as_of_version, const DeepSpeedVersion& version) {
  if (as_of_version.empty()) return false;
  DeepSpeedVersion found{};
  const char* at = as_of_version.data();
  const char* const end = at + as_of_version.size();
  for (size_t i = 0; i < found.size(); ++i) {
    const auto [next, error] = std::from_chars(at, end, found[i]);
    const bool last = i + 1 == found.size();
    if (error != std::errc() || found[i] < 0 || (last ? next != end : next == end || *next != '.'))
      raise<ConfigError>("as_of_version: found '{}', expected a version of DeepSpeed as 0.19.8.", as_of_version);
    at = next + 1;
  }
  return found < version;
}

class DeepSpeedSchedule : public LRScheduler {
 public:
  /// @param last_batch_iteration  DeepSpeed's count of steps, less one: this base's last_epoch_ less one.
  DeepSpeedSchedule(torch::optim::Optimizer& optimizer, const char* name, int64_t last_batch_iteration)
      : LRScheduler(optimizer), name_(name) {
    if (last_batch_iteration < -1)
      raise<ConfigError>("{}: found last_batch_iteration {}, expected -1 for a beginning, or that of a state.", name,
                         last_batch_iteration);
    resumed_at_ = last_batch_iteration + 1;
  }

  c10::IValue state_dict() const override {
    Dict state = make_dict();
    state.insert("last_batch_iteration", last_epoch_ - 1);
    return state;
  }
  void load_state_dict(const c10::IValue& state) override {
    DictReader reader(state, fmt::format("{} state", name_));
    const int64_t last = reader.integer("last_batch_iteration");
    if (last < -1) reader.fail("found last_batch_iteration {}, expected -1 or more", last);
    last_epoch_ = last + 1;
    step_count_ = last_epoch_ + 1;
    last_lrs_ = rates();
  }

 protected:
  /// For the step that last_epoch_ says.
  virtual std::vector<double> rates() const = 0;
  std::vector<double> compute_lrs() override { return rates(); }

  double last_batch_iteration() const { return static_cast<double>(last_epoch_ - 1); }
  const char* name() const { return name_; }

  std::vector<double> one_per_group(const char* option, const PerGroup& value) const {
    const size_t groups = base_lrs_.size();
    if (!value.is_list()) return std::vector<double>(groups, value.values().front());
    if (value.values().size() != groups)
      raise<ConfigError>("{}: found {} values in {}, expected a number, or a list of {} (one per parameter group).",
                         name_, value.values().size(), option, groups);
    return value.values();
  }

 private:
  void initial_step() override {
    if (resumed_at_ == 0) return step();
    last_epoch_ = resumed_at_;
    step_count_ = resumed_at_ + 1;
  }

  const char* name_;
  int64_t resumed_at_;
};

/// The share of the way up, during the first steps.
class DeepSpeedWarmup {
 public:
  DeepSpeedWarmup(const char* schedule, int64_t num_steps, const std::string& type, const std::string& as_of_version)
      : num_steps_(std::max<int64_t>(2, num_steps)),
        is_log_(type == "log"),
        inverse_log_(1.0 / std::log(static_cast<double>(num_steps_))) {
    if (num_steps <= 0 && !is_before(as_of_version, {0, 19, 6}))
      raise<ConfigError>("{}: found warmup_num_steps {}, expected at least 1.", schedule, num_steps);
    static const std::vector<std::string> kTypes{"log", "linear"};
    if (is_log_ || type == "linear") return;
    const auto nearest = nearest_name(type, kTypes);
    raise<ConfigError>("{}: found warmup_type '{}', expected one of {}{}.", schedule, type, fmt::join(kTypes, ", "),
                       nearest ? fmt::format("; did you mean {}?", *nearest) : "");
  }

  double num_steps() const { return static_cast<double>(num_steps_); }
  bool is_over(double step) const { return step >= num_steps(); }
  double share(double step) const { return is_log_ ? inverse_log_ * std::log(step + 1) : step / num_steps(); }

 private:
  int64_t num_steps_;
  bool is_log_;
  double inverse_log_;
};

/// The end of a schedule, which the schedule must be told.
double steps_in_all(const char* schedule, const std::optional<int64_t>& total_num_steps,
                    const DeepSpeedWarmup& warmup) {
  if (!total_num_steps)
    raise<ConfigError>("{}: found no total_num_steps, expected the number of steps of the training.", schedule);
  const auto total = static_cast<double>(*total_num_steps);
  if (total < warmup.num_steps())
    logs::warn("accelerate.optim", "{}: total_num_steps {} is less than warmup_num_steps {}", schedule, total,
               warmup.num_steps());
  return total;
}

class WarmupLR : public DeepSpeedSchedule {
 public:
  WarmupLR(torch::optim::Optimizer& optimizer, const char* name, const WarmupLROptions& options)
      : DeepSpeedSchedule(optimizer, name, options.last_batch_iteration),
        warmup_(name, options.warmup_num_steps, options.warmup_type, options.as_of_version),
        first_group_only_(is_before(options.as_of_version, {0, 19, 4})),
        min_lrs_(one_per_group("warmup_min_lr", options.warmup_min_lr)) {
    if (options.warmup_max_lr) max_lrs_ = one_per_group("warmup_max_lr", *options.warmup_max_lr);
  }

 protected:
  /// The share of the way from the smallest rate to the largest.
  virtual double share_after_warmup() const { return 1.0; }
  const DeepSpeedWarmup& warmup() const { return warmup_; }

  std::vector<double> rates() const override {
    if (last_epoch_ == 0) return min_lrs_;
    const double step = last_batch_iteration();
    const double share = warmup_.is_over(step) ? share_after_warmup() : warmup_.share(step);
    auto lrs = min_lrs_;
    for (size_t i = 0; i < lrs.size(); ++i) lrs[i] += (max_lr(i) - min_lrs_[i]) * share;
    return lrs;
  }

 private:
  double max_lr(size_t group) const {
    return max_lrs_.empty() ? base_lrs_[first_group_only_ ? 0 : group] : max_lrs_[group];
  }

  DeepSpeedWarmup warmup_;
  bool first_group_only_;
  std::vector<double> min_lrs_, max_lrs_;  ///< no largest ones: the groups' own
};

class WarmupDecayLR : public WarmupLR {
 public:
  WarmupDecayLR(torch::optim::Optimizer& optimizer, const WarmupDecayLROptions& options)
      : WarmupLR(optimizer, "warmup_decay_lr",
                 {.warmup_min_lr = options.warmup_min_lr,
                  .warmup_max_lr = options.warmup_max_lr,
                  .warmup_num_steps = options.warmup_num_steps,
                  .warmup_type = options.warmup_type,
                  .last_batch_iteration = options.last_batch_iteration,
                  .as_of_version = options.as_of_version}),
        total_(steps_in_all(name(), options.total_num_steps, warmup())) {}

 protected:
  double share_after_warmup() const override {
    return std::max(0.0, (total_ - last_batch_iteration()) / std::max(1.0, total_ - warmup().num_steps()));
  }

 private:
  double total_;
};

class WarmupCosineLR : public DeepSpeedSchedule {
 public:
  WarmupCosineLR(torch::optim::Optimizer& optimizer, const WarmupCosineLROptions& options)
      : DeepSpeedSchedule(optimizer, "warmup_cosine_lr", options.last_batch_iteration),
        options_(options),
        rises_again_(is_before(options.as_of_version, {0, 19, 4})),
        warmup_(name(), options.warmup_num_steps, options.warmup_type, options.as_of_version),
        total_(steps_in_all(name(), options.total_num_steps, warmup_)) {}

 protected:
  std::vector<double> rates() const override {
    const double ratio = ratio_now();
    auto lrs = base_lrs_;
    for (double& lr : lrs) lr *= ratio;
    return lrs;
  }

 private:
  double ratio_now() const {
    if (last_epoch_ == 0) return 0;
    const double step = last_batch_iteration();
    if (!warmup_.is_over(step))
      return options_.warmup_min_ratio + warmup_.share(step) * (1.0 - options_.warmup_min_ratio);
    const double done = (step - warmup_.num_steps() + 1) / std::max(1.0, total_ - warmup_.num_steps());
    const double height = (1 + std::cos(std::numbers::pi * (rises_again_ ? done : std::min(1.0, done)))) / 2;
    return std::max(0.0, options_.cos_min_ratio + (1.0 - options_.cos_min_ratio) * height);
  }

  WarmupCosineLROptions options_;
  bool rises_again_;
  DeepSpeedWarmup warmup_;
  double total_;
};

class DeepSpeedOneCycle : public DeepSpeedSchedule {
 public:
  DeepSpeedOneCycle(torch::optim::Optimizer& optimizer, const DeepSpeedOneCycleOptions& options)
      : DeepSpeedSchedule(optimizer, "deepspeed_one_cycle", options.last_batch_iteration),
        options_(options),
        second_(options.cycle_second_step_size.value_or(options.cycle_first_step_size)),
        min_lrs_(checked("cycle_min_lr", options.cycle_min_lr)),
        max_lrs_(checked("cycle_max_lr", options.cycle_max_lr)),
        min_moms_(checked("cycle_min_mom", options.cycle_min_mom)),
        max_moms_(checked("cycle_max_mom", options.cycle_max_mom)) {
    if (!(first() > 0))
      raise<ConfigError>("{}: found cycle_first_step_size {}, expected more than 0.", name(), first());
    if (!(second_ >= 0))
      raise<ConfigError>("{}: found cycle_second_step_size {}, expected 0 or more.", name(), second_);
    if (is_before(options.as_of_version, {0, 19, 4})) stairs_[0] = stairs_[1] = 0;
    else
      stairs_[0] = options.cycle_first_stair_count, stairs_[1] = options.cycle_second_stair_count.value_or(stairs_[0]);
    const auto& groups = optimizer.param_groups();
    if (options_.cycle_momentum &&
        std::none_of(groups.begin(), groups.end(), [](const auto& group) { return uses_beta1(group.options()); })) {
      logs::warn("accelerate.optim", "{}: cycle_momentum has no effect, because the optimizer has no betas", name());
      options_.cycle_momentum = false;
    }
  }

 protected:
  std::vector<double> rates() const override {
    auto lrs = min_lrs_;
    if (in_cycle()) {
      const double height = height_now();
      for (size_t i = 0; i < lrs.size(); ++i) lrs[i] += (max_lrs_[i] - min_lrs_[i]) * height;
    } else if (const double factor = decay(options_.decay_lr_rate); factor != 1) {
      for (double& lr : lrs) lr /= factor;
    }
    return lrs;
  }

  std::vector<double> compute_lrs() override {
    auto& groups = optimizer().param_groups();
    if (options_.cycle_momentum)
      for (size_t i = 0; i < groups.size(); ++i) set_betas(groups[i].options(), {momentum(i), kBeta2});
    return rates();
  }

 private:
  static constexpr double kBeta2 = 0.99;

  std::vector<double> checked(const char* option, const PerGroup& value) const {
    if (value.is_list() && is_before(options_.as_of_version, {0, 19, 6}))
      raise<ConfigError>("{}: found a list in {}, expected a number as of version {}; lists are taken since 0.19.6.",
                         name(), option, options_.as_of_version);
    return one_per_group(option, value);
  }

  double first() const { return options_.cycle_first_step_size; }
  double length() const { return first() + second_; }
  bool in_cycle() const { return last_batch_iteration() < length(); }

  /// From 0 to 1 and back.
  double height_now() const {
    const auto step = static_cast<double>(last_epoch_);
    const double within = 1 + step / length() - std::floor(1 + step / length()), top = first() / length();
    const bool rises = within <= top;
    const auto stairs = static_cast<double>(stairs_[rises ? 0 : 1]);
    if (stairs <= 0) return rises ? within / top : (within - 1) / (top - 1);
    // The share of whole steps, since a height a last bit below a stair would fall to the one before.
    const double of_cycle = std::fmod(step, length());
    const double position =
        of_cycle <= first() ? of_cycle * stairs / first() : (length() - of_cycle) * stairs / second_;
    return std::floor(position) / stairs;
  }

  /// The number that rates are divided by after the cycle, and momentums multiplied with.
  double decay(double rate) const {
    if (options_.decay_step_size == 0 || rate == 0) return 1;
    return 1 + rate * ((last_batch_iteration() - length() + 1) / options_.decay_step_size);
  }

  double momentum(size_t group) const {
    if (last_epoch_ == 0) return min_moms_[group];  // DeepSpeed begins the cycle of betas with its second value
    const double most = max_moms_[group];
    return in_cycle() ? most - (most - min_moms_[group]) * height_now() : most * decay(options_.decay_mom_rate);
  }

  DeepSpeedOneCycleOptions options_;
  double second_;
  int64_t stairs_[2];
  std::vector<double> min_lrs_, max_lrs_, min_moms_, max_moms_;
};

class LRRangeTest : public DeepSpeedSchedule {
 public:
  LRRangeTest(torch::optim::Optimizer& optimizer, const LRRangeTestOptions& options)
      : DeepSpeedSchedule(optimizer, "lr_range_test", options.last_batch_iteration),
        options_(options),
        min_lrs_(one_per_group("lr_range_test_min_lr", options.lr_range_test_min_lr)) {
    if (options.lr_range_test_step_size <= 0)
      raise<ConfigError>("{}: found lr_range_test_step_size {}, expected at least 1.", name(),
                         options.lr_range_test_step_size);
  }

 protected:
  std::vector<double> rates() const override {
    const double passed = static_cast<double>(last_epoch_) / static_cast<double>(options_.lr_range_test_step_size);
    const double growth =
        1 + options_.lr_range_test_step_rate * (options_.lr_range_test_staircase ? std::floor(passed) : passed);
    auto lrs = min_lrs_;
    for (double& lr : lrs) lr *= growth;
    return lrs;
  }

 private:
  LRRangeTestOptions options_;
  std::vector<double> min_lrs_;
};

}  // namespace

Scheduler warmup_lr(torch::optim::Optimizer& optimizer, const WarmupLROptions& options) {
  return Scheduler(std::make_shared<WarmupLR>(optimizer, "warmup_lr", options));
}
Scheduler warmup_decay_lr(torch::optim::Optimizer& optimizer, const WarmupDecayLROptions& options) {
  return Scheduler(std::make_shared<WarmupDecayLR>(optimizer, options));
}
Scheduler warmup_cosine_lr(torch::optim::Optimizer& optimizer, const WarmupCosineLROptions& options) {
  return Scheduler(std::make_shared<WarmupCosineLR>(optimizer, options));
}
Scheduler deepspeed_one_cycle(torch::optim::Optimizer& optimizer, const DeepSpeedOneCycleOptions& options) {
  return Scheduler(std::make_shared<DeepSpeedOneCycle>(optimizer, options));
}
Scheduler lr_range_test(torch::optim::Optimizer& optimizer, const LRRangeTestOptions& options) {
  return Scheduler(std::make_shared<LRRangeTest>(optimizer, options));
}

}  // namespace accelerate::optim
