#include "accelerate/bigmodel/hooks.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>

#include <unordered_map>

#include "accelerate/utils/ops.hpp"
#include "bigmodel/replace.hpp"
#include "model/hook_registry.hpp"

namespace accelerate {

/// Keeps the host's copies while the weights are on the device: inference changes none, so going back is free.
class UserCpuOffloadHook::Hook final : public ModelHook, public std::enable_shared_from_this<Hook> {
 public:
  Hook(const ModelRef& model, at::Device device, UserCpuOffloadHook previous)
      : identity_(model.identity()), state_(model.state()), device_(device), previous_(std::move(previous)) {}

  void init_hook(const ModelRef&) override {
    const at::NoGradGuard no_grad;
    for (auto& [name, tensor] : state_)
      if (!tensor.is_cpu()) bigmodel::replace_values(tensor, tensor.cpu());
  }
  void pre_forward(const ModelRef&, std::vector<at::Tensor>& inputs) override {
    if (previous_) previous_.offload();
    const at::NoGradGuard no_grad;
    for (auto& [name, tensor] : state_) {
      if (tensor.device() == device_) continue;
      if (tensor.is_cpu() && !host_.contains(tensor.unsafeGetTensorImpl()))
        host_.emplace(tensor.unsafeGetTensorImpl(), Kept{tensor.variable_data(), 0});
      bigmodel::replace_values(tensor, tensor.to(device_, /*non_blocking=*/tensor.is_pinned()));
      if (const auto kept = host_.find(tensor.unsafeGetTensorImpl()); kept != host_.end())
        kept->second.version = tensor._version();
    }
    for (auto& input : inputs)
      if (input.defined()) input = ops::to_device(input, device_, false);
  }
  void offload() {
    const at::NoGradGuard no_grad;
    for (auto& [name, tensor] : state_) {
      if (tensor.is_cpu()) continue;
      const auto kept = host_.find(tensor.unsafeGetTensorImpl());
      const bool unchanged = kept != host_.end() && kept->second.version == tensor._version();
      bigmodel::replace_values(tensor, unchanged ? kept->second.value : tensor.cpu());
    }
    host_.clear();
  }
  void remove() {
    static_cast<void>(detail::take_hook(identity_));
    host_.clear();
  }

 private:
  struct Kept {
    at::Tensor value;
    int64_t version;
  };
  const void* identity_;
  NamedTensors state_;
  at::Device device_;
  UserCpuOffloadHook previous_;
  std::unordered_map<const at::TensorImpl*, Kept> host_;
};

void UserCpuOffloadHook::offload() const {
  if (hook_) hook_->offload();
}
void UserCpuOffloadHook::remove() const {
  if (hook_) hook_->remove();
}

UserCpuOffloadHook cpu_offload_with_hook(const ModelRef& model, std::optional<at::Device> execution_device,
                                         const UserCpuOffloadHook& prev_module_hook) {
  if (!execution_device) {
    const auto accelerator = at::getAccelerator();
    execution_device = accelerator && at::accelerator::deviceCount() > 0
                           ? at::Device(*accelerator, at::accelerator::getDeviceIndex())
                           : at::Device(at::kCPU);
  }
  auto hook = std::make_shared<UserCpuOffloadHook::Hook>(model, *execution_device, prev_module_hook);
  add_hook_to_module(model, hook, /*append=*/true);
  return UserCpuOffloadHook(std::move(hook));
}

}  // namespace accelerate
