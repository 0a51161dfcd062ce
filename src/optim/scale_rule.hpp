#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "accelerate/optim/grad_scaler.hpp"
#include "optim/ivalue_access.hpp"

namespace accelerate::optim {

/// The answer of a scalar; no in a dry run, whose numbers have no values.
inline bool is_true(const at::Tensor& flag) { return !flag.is_meta() && flag.item<float>() != 0; }

/// The scale that a loss is multiplied by, and how it follows from what has become of the gradients. It is equal on all
/// ranks if they are told the same.
class ScaleRule {
 public:
  virtual ~ScaleRule() = default;
  /// To see what would come.
  virtual std::shared_ptr<ScaleRule> clone() const = 0;

  /// The scale lives on this device from here on.
  virtual void begin(const at::Device& device) = 0;
  /// fp32 scalar, whose value the rule changes in place; undefined before begin().
  virtual const at::Tensor& tensor() const = 0;
  virtual double value() const = 0;  ///< waits for the device
  virtual void set(double value) = 0;
  /// Losses are multiplied by another number than 1.
  virtual bool scales() const { return true; }

  /// @throws ConfigError where update() would.
  virtual void check(const at::Tensor& found_inf) const { static_cast<void>(found_inf); }
  /// After a step, or several that count as one. @param found_inf  scalar: 0, or not where gradients overflowed
  /// @throws ConfigError, having changed nothing, where the scale can shrink no further.
  virtual void update(const at::Tensor& found_inf) = 0;

  virtual double growth_factor() const { return 1; }
  virtual double backoff_factor() const { return 1; }
  virtual int64_t growth_interval() const { return 0; }
  virtual int64_t good_steps() const { return 0; }
  virtual std::optional<int64_t> hysteresis() const { return std::nullopt; }

  virtual void save(Dict& state) const = 0;
  /// @throws CheckpointError, having changed nothing.
  virtual void load(DictReader& state) = 0;
};

/// PyTorch's. All three @throw ConfigError for numbers out of range.
std::shared_ptr<ScaleRule> make_scale_rule(const GradScalerKwargs& kwargs);
std::shared_ptr<ScaleRule> make_scale_rule(const DynamicLossScale& settings);
std::shared_ptr<ScaleRule> make_scale_rule(const FixedLossScale& settings);

}  // namespace accelerate::optim
