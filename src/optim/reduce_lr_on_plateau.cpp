#include <algorithm>
#include <limits>

#include "accelerate/optim/schedules.hpp"
#include "optim/ivalue_access.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {
namespace {

class ReduceLROnPlateau : public LRScheduler {
 public:
  ReduceLROnPlateau(torch::optim::Optimizer& optimizer, const ReduceLROnPlateauOptions& options)
      : LRScheduler(optimizer), options_(options) {
    if (!(options.factor > 0 && options.factor < 1))
      raise<ConfigError>("reduce_lr_on_plateau: found factor {}, expected a number between 0 and 1.", options.factor);
    const size_t groups = base_lrs_.size();
    if (options.min_lr.size() != 1 && options.min_lr.size() != groups)
      raise<ConfigError>("reduce_lr_on_plateau: found {} values in min_lr, expected 1 or {} (one per parameter group).",
                         options.min_lr.size(), groups);
    if (options_.min_lr.size() == 1) options_.min_lr.assign(groups, options.min_lr[0]);
    best_ = worst();
  }

  void step(std::optional<double> metric) override {
    if (!metric)
      throw ConfigError(
          "reduce_lr_on_plateau: step() was called without a metric, expected step(metric), e.g. the validation loss.");
    ++step_count_;
    ++last_epoch_;
    if (is_better(*metric)) {
      best_ = *metric;
      num_bad_epochs_ = 0;
    } else {
      ++num_bad_epochs_;
    }
    if (cooldown_counter_ > 0) {
      --cooldown_counter_;
      num_bad_epochs_ = 0;
    }
    auto lrs = current_lrs();
    if (num_bad_epochs_ > options_.patience) {
      for (size_t i = 0; i < lrs.size(); ++i) {
        const double reduced = std::max(lrs[i] * options_.factor, options_.min_lr.at(i));
        if (lrs[i] - reduced > options_.eps) lrs[i] = reduced;
      }
      cooldown_counter_ = options_.cooldown;
      num_bad_epochs_ = 0;
    }
    set_lrs(lrs);
  }

  void restart(const std::vector<double>&) override {
    throw ConfigError(
        "sequential_lr: found a reduce_lr_on_plateau, expected schedules that step without a metric, which it can't "
        "pass on.");
  }

  c10::IValue state_dict() const override {
    Dict state = make_dict();
    const auto& min_lrs = options_.min_lr;
    const bool one_min_lr =
        std::all_of(min_lrs.begin(), min_lrs.end(), [&](double value) { return value == min_lrs[0]; });
    state.insert("factor", options_.factor);
    state.insert("default_min_lr", one_min_lr ? c10::IValue(min_lrs[0]) : c10::IValue());
    state.insert("min_lrs", make_list(min_lrs));
    state.insert("patience", options_.patience);
    state.insert("cooldown", options_.cooldown);
    state.insert("eps", options_.eps);
    state.insert("last_epoch", last_epoch_);
    state.insert("_last_lr", make_list(last_lrs_));
    state.insert("mode_worse", worst());
    state.insert("mode", options_.maximize ? "max" : "min");
    state.insert("threshold", options_.threshold);
    state.insert("threshold_mode", options_.absolute_threshold ? "abs" : "rel");
    state.insert("best", best_);
    state.insert("cooldown_counter", cooldown_counter_);
    state.insert("num_bad_epochs", num_bad_epochs_);
    return state;
  }

  void load_state_dict(const c10::IValue& state) override {
    DictReader reader(state, "reduce-on-plateau scheduler state");
    const size_t groups = base_lrs_.size();
    ReduceLROnPlateauOptions options;
    options.maximize = word(reader, "mode", "min", "max");
    options.absolute_threshold = word(reader, "threshold_mode", "rel", "abs");
    options.factor = reader.number("factor");
    options.patience = reader.integer("patience");
    options.threshold = reader.number("threshold");
    options.cooldown = reader.integer("cooldown");
    options.min_lr = reader.numbers("min_lrs", groups);
    options.eps = reader.number("eps");
    auto last_lrs = reader.numbers("_last_lr", groups);
    const int64_t last_epoch = reader.integer("last_epoch");
    const int64_t cooldown_counter = reader.integer("cooldown_counter");
    const int64_t num_bad_epochs = reader.integer("num_bad_epochs");
    best_ = reader.number("best");
    options_ = options;
    last_lrs_ = std::move(last_lrs);
    last_epoch_ = last_epoch;
    step_count_ = last_epoch + 1;
    cooldown_counter_ = cooldown_counter;
    num_bad_epochs_ = num_bad_epochs;
  }

 protected:
  std::vector<double> compute_lrs() override { return current_lrs(); }

 private:
  /// Nothing to apply before the first metric.
  void initial_step() override { step_count_ = 1, last_epoch_ = 0; }

  static bool word(DictReader& reader, const std::string& key, const std::string& off, const std::string& on) {
    const auto& value = reader.at(key);
    if (!value.isString() || (value.toStringRef() != off && value.toStringRef() != on))
      reader.fail("found an unknown value at '{}', expected '{}' or '{}'", key, off, on);
    return value.toStringRef() == on;
  }
  double worst() const { return (options_.maximize ? -1 : 1) * std::numeric_limits<double>::infinity(); }
  bool is_better(double metric) const {
    const double margin = options_.maximize ? options_.threshold : -options_.threshold;
    const double bar = options_.absolute_threshold ? best_ + margin : best_ * (1.0 + margin);
    return options_.maximize ? metric > bar : metric < bar;
  }

  ReduceLROnPlateauOptions options_;
  double best_ = 0;
  int64_t cooldown_counter_ = 0;
  int64_t num_bad_epochs_ = 0;
};

}  // namespace

Scheduler reduce_lr_on_plateau(torch::optim::Optimizer& optimizer, const ReduceLROnPlateauOptions& options) {
  return Scheduler(std::make_shared<ReduceLROnPlateau>(optimizer, options));
}

}  // namespace accelerate::optim
