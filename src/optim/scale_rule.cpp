#include "optim/scale_rule.hpp"

#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "utils/raise.hpp"

namespace accelerate::optim {
namespace {

at::Tensor scale_on(const at::Device& device, double value) {
  return at::full({}, value, at::TensorOptions().dtype(at::kFloat).device(device));
}

void check_setting(bool ok, const char* name, double value, const char* expected) {
  if (!ok) raise<ConfigError>("GradScaler: found {} {}, expected {}.", name, value, expected);
}

bool is_positive(double value) { return value > 0 && std::isfinite(value); }

/// Checks the numbers of a rule that is read out of a state.
template <class Check> void check_read(const DictReader& state, const Check& check) {
  try {
    check();
  } catch (const ConfigError& error) {
    state.fail("found a value out of range ({})", error.what());
  }
}

/// PyTorch's: all on the scale's device, which nobody waits for.
class TorchScale : public ScaleRule {
 public:
  explicit TorchScale(const GradScalerKwargs& kwargs) : kwargs_(kwargs) {
    if (kwargs.enabled) check_settings(kwargs);
  }
  std::shared_ptr<ScaleRule> clone() const override {
    auto copy = std::make_shared<TorchScale>(*this);
    if (scale_.defined()) copy->scale_ = scale_.clone(), copy->growth_tracker_ = growth_tracker_.clone();
    return copy;
  }

  void begin(const at::Device& device) override {
    scale_ = scale_on(device, kwargs_.init_scale);
    growth_tracker_ = at::full({}, initial_growth_tracker_, at::TensorOptions().dtype(at::kInt).device(device));
  }
  const at::Tensor& tensor() const override { return scale_; }
  double value() const override {
    return scale_.defined() && !scale_.is_meta() ? scale_.item<double>() : kwargs_.init_scale;
  }
  void set(double value) override {
    if (scale_.defined()) scale_.fill_(value);
    else kwargs_.init_scale = value;
  }
  void update(const at::Tensor& found_inf) override {
    if (!scale_.is_meta())
      at::_amp_update_scale_(scale_, growth_tracker_, found_inf, kwargs_.growth_factor, kwargs_.backoff_factor,
                             kwargs_.growth_interval);
  }

  double growth_factor() const override { return kwargs_.growth_factor; }
  double backoff_factor() const override { return kwargs_.backoff_factor; }
  int64_t growth_interval() const override { return kwargs_.growth_interval; }
  int64_t good_steps() const override {
    return growth_tracker_.defined() ? growth_tracker_.item<int64_t>() : initial_growth_tracker_;
  }

  void save(Dict& state) const override {
    state.insert("scale", value());
    state.insert("growth_factor", kwargs_.growth_factor);
    state.insert("backoff_factor", kwargs_.backoff_factor);
    state.insert("growth_interval", kwargs_.growth_interval);
    state.insert("_growth_tracker", good_steps());
  }
  void load(DictReader& state) override {
    GradScalerKwargs kwargs = kwargs_;
    kwargs.init_scale = state.number("scale");
    kwargs.growth_factor = state.number("growth_factor");
    kwargs.backoff_factor = state.number("backoff_factor");
    kwargs.growth_interval = state.integer("growth_interval");
    const int64_t growth_tracker = state.integer("_growth_tracker");
    check_read(state, [&] { check_settings(kwargs); });
    if (growth_tracker < 0) state.fail("found _growth_tracker {}, expected 0 or more", growth_tracker);
    kwargs_ = kwargs;
    initial_growth_tracker_ = growth_tracker;
    if (scale_.defined()) {
      scale_.fill_(kwargs.init_scale);
      growth_tracker_.fill_(growth_tracker);
    }
  }

 private:
  static void check_settings(const GradScalerKwargs& kwargs) {
    check_setting(is_positive(kwargs.init_scale), "init_scale", kwargs.init_scale, "a positive number");
    check_setting(kwargs.growth_factor > 1 && std::isfinite(kwargs.growth_factor), "growth_factor",
                  kwargs.growth_factor, "more than 1");
    check_setting(kwargs.backoff_factor > 0 && kwargs.backoff_factor < 1, "backoff_factor", kwargs.backoff_factor,
                  "a number between 0 and 1");
    check_setting(kwargs.growth_interval > 0, "growth_interval", static_cast<double>(kwargs.growth_interval),
                  "at least 1");
  }

  GradScalerKwargs kwargs_;
  int64_t initial_growth_tracker_ = 0;
  at::Tensor scale_;
  at::Tensor growth_tracker_;  ///< int32 scalar
};

/// A number on the host, which the tensor follows.
class HostScale : public ScaleRule {
 public:
  explicit HostScale(double value) : value_(value) {}

  void begin(const at::Device& device) override { tensor_ = scale_on(device, value_); }
  const at::Tensor& tensor() const override { return tensor_; }
  double value() const override { return value_; }
  void set(double value) override {
    value_ = value;
    if (tensor_.defined()) tensor_.fill_(value);
  }

  void save(Dict& state) const override {
    state.insert("dynamic", is_dynamic());
    state.insert("cur_scale", value_);
  }

 protected:
  virtual bool is_dynamic() const = 0;
  template <class Rule> static std::shared_ptr<ScaleRule> copy_of(const Rule& rule) {
    auto copy = std::make_shared<Rule>(rule);
    if (copy->tensor_.defined()) copy->tensor_ = copy->tensor_.clone();
    return copy;
  }
  /// @return the scale of a state of the same kind
  double read_scale(DictReader& state) const {
    if (state.boolean("dynamic") != is_dynamic())
      state.fail("found the state of a {} loss scale, expected that of a {} one, as this scaler has",
                 is_dynamic() ? "fixed" : "dynamic", is_dynamic() ? "dynamic" : "fixed");
    return state.number("cur_scale");
  }

 private:
  double value_;
  at::Tensor tensor_;
};

class FixedScale : public HostScale {
 public:
  explicit FixedScale(const FixedLossScale& settings) : HostScale(settings.scale) { check_settings(settings.scale); }
  std::shared_ptr<ScaleRule> clone() const override { return copy_of(*this); }
  bool scales() const override { return value() != 1; }
  void update(const at::Tensor&) override {}
  void load(DictReader& state) override {
    const double scale = read_scale(state);
    check_read(state, [&] { check_settings(scale); });
    set(scale);
  }

 protected:
  bool is_dynamic() const override { return false; }

 private:
  static void check_settings(double scale) {
    check_setting(is_positive(scale), "loss scale", scale, "a positive number");
  }
};

class HysteresisScale : public HostScale {
 public:
  explicit HysteresisScale(const DynamicLossScale& settings)
      : HostScale(settings.initial_scale), settings_(settings), left_(settings.hysteresis) {
    check_settings(settings);
  }
  std::shared_ptr<ScaleRule> clone() const override { return copy_of(*this); }

  void check(const at::Tensor& found_inf) const override {
    if (left_ > 1 || value() != settings_.min_scale || !is_true(found_inf)) return;
    raise<ConfigError>(
        "GradScaler::update: gradients overflowed at a loss scale of {}, which is the smallest one allowed (min_scale, "
        "DeepSpeed's min_loss_scale), expected some that are finite; there is nothing left to decrease. The training "
        "has probably diverged: look at the losses and the learning rate, or train in bf16, which has the range of "
        "fp32.",
        value());
  }

  void update(const at::Tensor& found_inf) override {
    check(found_inf);
    if (is_true(found_inf)) {
      if (left_ > 1) --left_;
      else set(std::max(value() / kFactor, settings_.min_scale));
      last_overflow_ = updates_;
    } else {
      const int64_t stable = updates_ - last_overflow_ - 1;
      const bool grows = stable > 0 && stable % settings_.window == 0;
      if (grows || settings_.consecutive_hysteresis) left_ = settings_.hysteresis;
      // In fp32, which the tensor has, the scale is to stay a number.
      if (grows && value() * kFactor <= std::numeric_limits<float>::max()) set(value() * kFactor);
    }
    ++updates_;
  }

  double growth_factor() const override { return kFactor; }
  double backoff_factor() const override { return 1 / kFactor; }
  int64_t growth_interval() const override { return settings_.window; }
  int64_t good_steps() const override { return updates_ - last_overflow_ - 1; }
  std::optional<int64_t> hysteresis() const override { return left_; }

  void save(Dict& state) const override {
    HostScale::save(state);
    state.insert("cur_iter", updates_);
    state.insert("last_overflow_iter", last_overflow_);
    state.insert("cur_hysteresis", left_);
    state.insert("scale_factor", kFactor);
    state.insert("scale_window", settings_.window);
    state.insert("delayed_shift", settings_.hysteresis);
    state.insert("consecutive_hysteresis", settings_.consecutive_hysteresis);
    state.insert("min_scale", settings_.min_scale);
  }
  void load(DictReader& state) override {
    const double scale = read_scale(state);
    const int64_t updates = state.integer("cur_iter"), last_overflow = state.integer("last_overflow_iter");
    const int64_t left = state.integer("cur_hysteresis");
    DynamicLossScale settings;
    settings.window = state.integer("scale_window");
    settings.hysteresis = state.integer("delayed_shift");
    settings.consecutive_hysteresis = state.boolean("consecutive_hysteresis");
    settings.min_scale = state.number("min_scale");
    settings.initial_scale = scale;
    check_read(state, [&] { check_settings(settings); });
    if (const double factor = state.number("scale_factor"); factor != kFactor)
      state.fail("found scale_factor {}, expected {}", factor, kFactor);
    if (updates < 0 || last_overflow < -1 || last_overflow >= updates)
      state.fail("found last_overflow_iter {} and cur_iter {}, expected -1 or the number of an update before",
                 last_overflow, updates);
    if (left < 1 || left > settings.hysteresis)
      state.fail("found cur_hysteresis {}, expected 1 to {}", left, settings.hysteresis);
    settings_ = settings;
    updates_ = updates;
    last_overflow_ = last_overflow;
    left_ = left;
    set(scale);
  }

 protected:
  bool is_dynamic() const override { return true; }

 private:
  static constexpr double kFactor = 2;

  static void check_settings(const DynamicLossScale& settings) {
    const double scale = settings.initial_scale;
    check_setting(is_positive(settings.min_scale), "min_scale", settings.min_scale, "a positive number");
    check_setting(scale >= settings.min_scale && std::isfinite(scale), "a loss scale of", scale, "at least min_scale");
    check_setting(settings.window > 0, "window", static_cast<double>(settings.window), "at least 1");
    check_setting(settings.hysteresis > 0, "hysteresis", static_cast<double>(settings.hysteresis), "at least 1");
  }

  DynamicLossScale settings_;
  int64_t left_;  ///< overflows, until the scale shrinks
  int64_t updates_ = 0, last_overflow_ = -1;
};

}  // namespace

std::shared_ptr<ScaleRule> make_scale_rule(const GradScalerKwargs& kwargs) {
  return std::make_shared<TorchScale>(kwargs);
}
std::shared_ptr<ScaleRule> make_scale_rule(const DynamicLossScale& settings) {
  return std::make_shared<HysteresisScale>(settings);
}
std::shared_ptr<ScaleRule> make_scale_rule(const FixedLossScale& settings) {
  return std::make_shared<FixedScale>(settings);
}

}  // namespace accelerate::optim
