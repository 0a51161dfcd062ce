#pragma once

/// Models that take turns on a device. Hooks of your own: model/hooks.hpp.

#include <c10/core/Device.h>

#include <memory>
#include <optional>
#include <utility>

#include "accelerate/model/callable.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Ends one model's turn in a pipeline, see cpu_offload_with_hook().
class ACCELERATE_API UserCpuOffloadHook {
 public:
  UserCpuOffloadHook() = default;
  explicit operator bool() const { return hook_ != nullptr; }
  /// The weights are in host memory from now on. Costs nothing unless they were changed on the device: the host kept
  /// its copies.
  void offload() const;
  /// Removes the hook from its model and leaves the weights where they are.
  void remove() const;

 private:
  class Hook;
  UserCpuOffloadHook(std::shared_ptr<Hook> hook) : hook_(std::move(hook)) {}  // NOLINT(google-explicit-constructor)
  std::shared_ptr<Hook> hook_;
  friend ACCELERATE_API UserCpuOffloadHook cpu_offload_with_hook(const ModelRef& model,
                                                                 std::optional<at::Device> execution_device,
                                                                 const UserCpuOffloadHook& prev_module_hook);
};

/// Moves all weights to host memory, and to `execution_device` (default: the accelerator, or the host where there is
/// none) when the model is called, where they stay until offload(): for loops that call one model many times. With
/// `prev_module_hook` the call sends that model back first, so that of a chain only one is on the device.
ACCELERATE_API UserCpuOffloadHook cpu_offload_with_hook(const ModelRef& model,
                                                        std::optional<at::Device> execution_device,
                                                        const UserCpuOffloadHook& prev_module_hook);
/// The same for the model's own type: call the first of the pair.
template <ModelLike Model>
std::pair<Hooked<Model>, UserCpuOffloadHook> cpu_offload_with_hook(
    const Model& model, std::optional<at::Device> execution_device = std::nullopt,
    const UserCpuOffloadHook& prev_module_hook = {}) {
  auto hook = cpu_offload_with_hook(ModelRef(model), execution_device, prev_module_hook);
  return {Hooked<Model>(model), std::move(hook)};
}

}  // namespace accelerate
