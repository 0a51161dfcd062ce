#include <cmath>
#include <numbers>

#include "accelerate/optim/schedules.hpp"
#include "optim/ivalue_access.hpp"
#include "optim/momentum.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {
namespace {

class OneCycleLR : public LRScheduler {
 public:
  OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleOptions& options)
      : LRScheduler(optimizer), options_(options) {
    if (options.total_steps.has_value() == (options.epochs.has_value() && options.steps_per_epoch.has_value()))
      throw ConfigError("one_cycle: expected either total_steps or both of epochs and steps_per_epoch.");
    total_steps_ = options.total_steps ? *options.total_steps : *options.epochs * *options.steps_per_epoch;
    if (total_steps_ <= 0 || options.epochs.value_or(1) <= 0)
      raise<ConfigError>("one_cycle: found {} total steps, expected at least 1.", total_steps_);
    if (!(options.pct_start >= 0 && options.pct_start <= 1))
      raise<ConfigError>("one_cycle: found pct_start {}, expected a number from 0 to 1.", options.pct_start);
    auto& groups = optimizer.param_groups();
    if (options.max_lr.size() != 1 && options.max_lr.size() != groups.size())
      raise<ConfigError>("one_cycle: found {} values in max_lr, expected 1 or {} (one per parameter group).",
                         options.max_lr.size(), groups.size());
    for (size_t i = 0; i < groups.size(); ++i) {
      max_lrs_.push_back(options.max_lr[options.max_lr.size() == 1 ? 0 : i]);
      base_lrs_[i] = max_lrs_[i] / options.div_factor;
      if (options.cycle_momentum && !set_momentum(groups[i].options(), options.max_momentum))
        throw ConfigError("one_cycle: the optimizer has neither momentum nor betas; set cycle_momentum = false.");
    }
    const double rise = options.pct_start * static_cast<double>(total_steps_);
    const auto end = static_cast<double>(total_steps_ - 1);
    if (options.three_phase)
      phases_ = {{rise - 1, kInitial, kMax, true, false},
                 {2 * rise - 2, kMax, kInitial, false, true},
                 {end, kInitial, kMin, true, true}};
    else phases_ = {{rise - 1, kInitial, kMax, true, false}, {end, kMax, kMin, false, true}};
  }

  std::optional<int64_t> total_steps() const override { return total_steps_; }
  void restart(const std::vector<double>&) override { LRScheduler::restart(base_lrs_); }  // its rates are its own

  c10::IValue state_dict() const override {
    static constexpr const char* kLrNames[] = {"initial_lr", "max_lr", "min_lr"};
    const auto momentum_name = [](bool max) { return max ? "max_momentum" : "base_momentum"; };
    auto state = LRScheduler::state_dict().toGenericDict();
    std::vector<c10::IValue> phases;
    for (const Phase& phase : phases_) {
      Dict entry = make_dict();
      entry.insert("end_step", phase.end_step);
      entry.insert("start_lr", kLrNames[phase.start_lr]);
      entry.insert("end_lr", kLrNames[phase.end_lr]);
      entry.insert("start_momentum", momentum_name(phase.starts_at_max_momentum));
      entry.insert("end_momentum", momentum_name(phase.ends_at_max_momentum));
      phases.emplace_back(entry);
    }
    state.insert("total_steps", total_steps_);
    state.insert("_schedule_phases", make_list(phases));
    state.insert("_anneal_func_type", options_.anneal_strategy == AnnealStrategy::cos ? "cos" : "linear");
    state.insert("cycle_momentum", options_.cycle_momentum);
    if (options_.cycle_momentum) state.insert("use_beta1", uses_beta1(optimizer().param_groups().at(0).options()));
    return state;
  }

  void load_state_dict(const c10::IValue& state) override {
    DictReader reader(state, "one-cycle scheduler state");
    if (const int64_t saved = reader.integer("total_steps"); saved != total_steps_)
      reader.fail(
          "found total_steps {}, expected {} as this schedule was made; make it with the number of steps "
          "that it had when it was saved",
          saved, total_steps_);
    LRScheduler::load_state_dict(state);
  }

 protected:
  std::vector<double> compute_lrs() override {
    if (last_epoch_ > total_steps_)
      raise<ConfigError>(
          "one_cycle: step {} is past the end, expected at most {} steps. Make the schedule with the number of steps "
          "that the training takes.",
          last_epoch_, total_steps_);
    const auto step = static_cast<double>(last_epoch_);
    size_t index = 0;
    while (index + 1 < phases_.size() && step > phases_[index].end_step) ++index;
    const Phase& phase = phases_[index];
    const double start = index == 0 ? 0.0 : phases_[index - 1].end_step;
    // A phase of no length is left at its end; Python divides by zero there.
    const double done = phase.end_step == start ? 1.0 : (step - start) / (phase.end_step - start);
    std::vector<double> lrs;
    auto& groups = optimizer().param_groups();
    for (size_t i = 0; i < groups.size(); ++i) {
      const double rates[] = {base_lrs_[i], max_lrs_[i], base_lrs_[i] / options_.final_div_factor};
      lrs.push_back(anneal(rates[phase.start_lr], rates[phase.end_lr], done));
      if (options_.cycle_momentum)
        set_momentum(groups[i].options(),
                     anneal(momentum(phase.starts_at_max_momentum), momentum(phase.ends_at_max_momentum), done));
    }
    return lrs;
  }

 private:
  enum Rate { kInitial, kMax, kMin };
  struct Phase {
    double end_step;
    Rate start_lr, end_lr;
    bool starts_at_max_momentum, ends_at_max_momentum;
  };

  double momentum(bool max) const { return max ? options_.max_momentum : options_.base_momentum; }
  double anneal(double start, double end, double done) const {
    if (options_.anneal_strategy == AnnealStrategy::linear) return (end - start) * done + start;
    return end + (start - end) / 2.0 * (std::cos(std::numbers::pi * done) + 1);
  }

  OneCycleOptions options_;
  int64_t total_steps_ = 0;
  std::vector<double> max_lrs_;
  std::vector<Phase> phases_;
};

}  // namespace

Scheduler one_cycle(torch::optim::Optimizer& optimizer, const OneCycleOptions& options) {
  return Scheduler(std::make_shared<OneCycleLR>(optimizer, options));
}

}  // namespace accelerate::optim
