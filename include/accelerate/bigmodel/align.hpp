#pragma once

/// One module's own weights by raw pointer, wherever a dispatched model has them.

#include <c10/core/Device.h>

#include <memory>
#include <optional>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Whether a parameter or buffer of this module, not of those below it, is offloaded: its bytes come and go. Weights
/// that lie in a mapped file don't.
ACCELERATE_API bool has_offloaded_params(const ModelRef& module);

/// While it lives, the module's own parameters and buffers (not those below) are present, on one device.
class ACCELERATE_API AlignedModule {
 public:
  AlignedModule(const ModelRef& module, std::optional<at::Device> execution_device);
  AlignedModule(AlignedModule&&) noexcept;
  AlignedModule& operator=(AlignedModule&&) = delete;
  /// Brings everything back; what was changed meanwhile is kept.
  ~AlignedModule();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Access to weights wherever they are: `{ auto here = align_module_device(block); read(block->weight.data_ptr()); }`.
/// @param execution_device  default: offloaded weights on the device that they compute on, others where they are
/// @throws ConfigError when offloaded weights should be on another device than they compute on; what fetching throws.
[[nodiscard]] ACCELERATE_API AlignedModule
align_module_device(const ModelRef& module, std::optional<at::Device> execution_device = std::nullopt);

}  // namespace accelerate
