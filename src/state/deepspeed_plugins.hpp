#pragma once

#include <memory>
#include <optional>
#include <string>

#include "accelerate/utils/export.hpp"

namespace accelerate {
struct DeepSpeedPlugin;
}

namespace accelerate::detail {

/// DeepSpeed's plugins as AcceleratorState tells of them; the layer that trains by them is behind it.
class DeepSpeedPlugins {
 public:
  virtual ~DeepSpeedPlugins() = default;
  /// Unset: the active one. @throws ConfigError for a name that is not there.
  virtual const DeepSpeedPlugin& get(const std::optional<std::string>& name) const = 0;
  virtual void select(const std::string& name) = 0;
  /// The active one's configuration, as it is by now, in one line.
  virtual std::string text() const = 0;
  /// The active one's zero3_init_flag: models that a library makes are made without memory.
  virtual bool makes_models_empty() const = 0;
};

/// Those of this process; null where nobody trains by any, and after AcceleratorState::reset().
ACCELERATE_API std::shared_ptr<DeepSpeedPlugins>& deepspeed_plugins();

/// How models are split, as the first Accelerator was told; of a type that only Accelerators know. Later ones that are
/// told nothing do the same. Null before, and after AcceleratorState::reset().
std::shared_ptr<void>& shared_engine();

}  // namespace accelerate::detail
