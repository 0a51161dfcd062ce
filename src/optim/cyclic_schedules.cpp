#include <cmath>
#include <numbers>

#include "accelerate/optim/schedules.hpp"
#include "optim/ivalue_access.hpp"
#include "optim/momentum.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {
namespace {

class CosineAnnealingWarmRestarts : public LRScheduler {
 public:
  CosineAnnealingWarmRestarts(torch::optim::Optimizer& optimizer, const WarmRestartsOptions& options)
      : LRScheduler(optimizer), options_(options), length_(options.T_0) {
    if (options.T_0 < 1)
      raise<ConfigError>("cosine_annealing_warm_restarts: found T_0 {}, expected at least 1.", options.T_0);
    if (options.T_mult < 1)
      raise<ConfigError>("cosine_annealing_warm_restarts: found T_mult {}, expected at least 1.", options.T_mult);
  }

  void step(std::optional<double> metric) override {
    if (++within_ >= length_) {
      within_ %= length_;
      length_ *= options_.T_mult;
    }
    LRScheduler::step(metric);
  }

  void restart(const std::vector<double>& initial) override {
    within_ = 0;
    length_ = options_.T_0;
    LRScheduler::restart(initial);
  }

  c10::IValue state_dict() const override {
    auto state = LRScheduler::state_dict().toGenericDict();
    state.insert("T_0", options_.T_0);
    state.insert("T_i", length_);
    state.insert("T_mult", options_.T_mult);
    state.insert("eta_min", options_.eta_min);
    state.insert("T_cur", within_);
    return state;
  }

  void load_state_dict(const c10::IValue& state) override {
    DictReader reader(state, "scheduler state");
    const int64_t length = reader.integer("T_i"), within = reader.integer("T_cur");
    if (length < 1 || within < 0 || within >= length)
      reader.fail("found T_cur {} of T_i {}, expected 0 <= T_cur < T_i", within, length);
    LRScheduler::load_state_dict(state);
    length_ = length;
    within_ = within;
  }

 protected:
  std::vector<double> compute_lrs() override {
    const double height =
        (1 + std::cos(std::numbers::pi * static_cast<double>(within_) / static_cast<double>(length_))) / 2;
    auto lrs = base_lrs_;
    for (double& lr : lrs) lr = options_.eta_min + (lr - options_.eta_min) * height;
    return lrs;
  }

 private:
  WarmRestartsOptions options_;
  int64_t length_;       ///< of this period
  int64_t within_ = -1;  ///< steps of it that are over
};

class CyclicLR : public LRScheduler {
 public:
  CyclicLR(torch::optim::Optimizer& optimizer, const CyclicOptions& options)
      : LRScheduler(optimizer), options_(options) {
    const int64_t up = options.step_size_up, down = options.step_size_down.value_or(up);
    if (up < 1 || down < 1)
      raise<ConfigError>("cyclic_lr: found step_size_up {} and step_size_down {}, expected at least 1.", up, down);
    total_size_ = static_cast<double>(up + down);
    step_ratio_ = static_cast<double>(up) / total_size_;
    base_lrs_ = one_per_group("base_lr", options.base_lr);
    max_lrs_ = one_per_group("max_lr", options.max_lr);
    set_lrs(base_lrs_);
    if (!options.scale_fn)
      options_.scale_mode = options.mode == CyclicMode::exp_range ? ScaleMode::iterations : ScaleMode::cycle;
    if (!options.cycle_momentum) return;
    base_momentums_ = one_per_group("base_momentum", options.base_momentum);
    max_momentums_ = one_per_group("max_momentum", options.max_momentum);
    auto& groups = optimizer.param_groups();
    for (size_t i = 0; i < groups.size(); ++i)
      if (!set_momentum(groups[i].options(), max_momentums_[i]))
        throw ConfigError("cyclic_lr: the optimizer has neither momentum nor betas; set cycle_momentum = false.");
  }

  void restart(const std::vector<double>&) override { LRScheduler::restart(base_lrs_); }  // its rates are its own

  c10::IValue state_dict() const override {
    static constexpr const char* kModes[] = {"triangular", "triangular2", "exp_range"};
    auto state = LRScheduler::state_dict().toGenericDict();
    state.insert("max_lrs", make_list(max_lrs_));
    state.insert("total_size", total_size_);
    state.insert("step_ratio", step_ratio_);
    state.insert("mode", kModes[static_cast<int>(options_.mode)]);
    state.insert("gamma", options_.gamma);
    state.insert("scale_mode", options_.scale_mode == ScaleMode::cycle ? "cycle" : "iterations");
    state.insert("_scale_fn_custom", c10::IValue());  // functions are not saved, in Python neither
    state.insert("cycle_momentum", options_.cycle_momentum);
    if (options_.cycle_momentum) {
      state.insert("use_beta1", uses_beta1(optimizer().param_groups().at(0).options()));
      state.insert("base_momentums", make_list(base_momentums_));
      state.insert("max_momentums", make_list(max_momentums_));
    }
    return state;
  }

 protected:
  std::vector<double> compute_lrs() override {
    const double position = static_cast<double>(last_epoch_) / total_size_, cycle = std::floor(1 + position);
    const double within = 1 + position - cycle;
    const double height = (within <= step_ratio_ ? within / step_ratio_ : (within - 1) / (step_ratio_ - 1));
    const double scale = scale_at(options_.scale_mode == ScaleMode::cycle ? cycle : static_cast<double>(last_epoch_));
    auto lrs = base_lrs_;
    auto& groups = optimizer().param_groups();
    for (size_t i = 0; i < lrs.size(); ++i) {
      lrs[i] += (max_lrs_[i] - base_lrs_[i]) * height * scale;
      if (options_.cycle_momentum)
        set_momentum(groups[i].options(),
                     max_momentums_[i] - (max_momentums_[i] - base_momentums_[i]) * height * scale);
    }
    return lrs;
  }

 private:
  std::vector<double> one_per_group(const char* name, const std::vector<double>& values) const {
    const size_t groups = base_lrs_.size();
    if (values.size() != 1 && values.size() != groups)
      raise<ConfigError>("cyclic_lr: found {} values in {}, expected 1 or {} (one per parameter group).", values.size(),
                         name, groups);
    return values.size() == 1 ? std::vector<double>(groups, values.front()) : values;
  }

  double scale_at(double x) const {
    if (options_.scale_fn) return options_.scale_fn(x);
    switch (options_.mode) {
      case CyclicMode::triangular:
        return 1;
      case CyclicMode::triangular2:
        return 1 / std::pow(2.0, x - 1);
      case CyclicMode::exp_range:
        return std::pow(options_.gamma, x);
    }
    return 1;
  }

  CyclicOptions options_;
  double total_size_, step_ratio_;
  std::vector<double> max_lrs_, base_momentums_, max_momentums_;
};

}  // namespace

Scheduler cosine_annealing_warm_restarts(torch::optim::Optimizer& optimizer, const WarmRestartsOptions& options) {
  return Scheduler(std::make_shared<CosineAnnealingWarmRestarts>(optimizer, options));
}

Scheduler cyclic_lr(torch::optim::Optimizer& optimizer, const CyclicOptions& options) {
  return Scheduler(std::make_shared<CyclicLR>(optimizer, options));
}

}  // namespace accelerate::optim
