#include "accelerate/bigmodel/align.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bigmodel/replace.hpp"
#include "residency/member.hpp"
#include "residency/raw_access.hpp"
#include "residency/unit.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// Own tensors of one module.
NamedTensors own_tensors(const ModelRef& module) {
  NamedTensors own;
  for (const auto& [name, tensor] : module.state())
    if (name.find('.') == std::string::npos) own.emplace_back(name, tensor);
  return own;
}

}  // namespace

bool has_offloaded_params(const ModelRef& module) {
  const auto own = own_tensors(module);
  return std::any_of(own.begin(), own.end(), [](const auto& item) {
    const auto* member = residency::Member::of(item.second);
    return member && !member->unit().fixed();
  });
}

struct AlignedModule::Impl {
  residency::RawAccess offloaded{residency::RawAccess::Writes::found};
  std::vector<std::pair<at::Tensor, at::Tensor>> moved;  ///< tensor, what it had
};

AlignedModule::AlignedModule(const ModelRef& module, std::optional<at::Device> execution_device)
    : impl_(std::make_unique<Impl>()) {
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : own_tensors(module)) {
    if (const auto* member = residency::Member::of(tensor)) {
      if (execution_device && *execution_device != tensor.device())
        raise<ConfigError>(
            "align_module_device: '{}' is offloaded and computes on {}, asked for on {}. Copy it: operators fetch what "
            "they need, so weight.to(device) works anywhere.",
            name, tensor.device().str(), execution_device->str());
      impl_->offloaded.add(*member);
    } else if (execution_device && tensor.device() != *execution_device) {
      impl_->moved.emplace_back(tensor, tensor.variable_data());
      bigmodel::replace_values(tensor, tensor.to(*execution_device));
    }
  }
}
AlignedModule::AlignedModule(AlignedModule&&) noexcept = default;
AlignedModule::~AlignedModule() {
  if (!impl_) return;
  const at::NoGradGuard no_grad;
  for (auto& [tensor, before] : impl_->moved) {
    if (!tensor.is_meta() && !before.is_meta()) before.copy_(tensor);
    bigmodel::replace_values(tensor, before);
  }
}

AlignedModule align_module_device(const ModelRef& module, std::optional<at::Device> execution_device) {
  return AlignedModule(module, execution_device);
}

}  // namespace accelerate
