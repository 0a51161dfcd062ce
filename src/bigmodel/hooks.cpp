#include "accelerate/bigmodel/hooks.hpp"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "accelerate/residency.hpp"
#include "accelerate/utils/ops.hpp"
#include "bigmodel/replace.hpp"
#include "residency/member.hpp"
#include "residency/residency.hpp"

namespace accelerate {
namespace {

/// Hooks by module. LibTorch's modules have no room for anything; what is kept for one that is gone is thrown out when
/// another is added.
class Registry {
 public:
  std::shared_ptr<ModelHook> get(const ModelRef& module) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(module.identity());
    return found == entries_.end() || !found->second.module()
               ? nullptr
               : found->second.hook;  // another module may have got the address of one that is gone
  }
  void set(const ModelRef& module, std::shared_ptr<ModelHook> hook) {
    const std::lock_guard lock(mutex_);
    std::erase_if(entries_, [](const auto& entry) { return !entry.second.module(); });
    Entry entry{.weak = {}, .script = std::nullopt, .hook = std::move(hook)};
    if (auto* plain = module.submodules().front().module) entry.weak = plain->weak_from_this();
    else entry.script = module;
    entries_.insert_or_assign(module.identity(), std::move(entry));
    count_ = entries_.size();
  }
  /// Forgets the hook of a module. @return the two; nothing where there was none.
  std::optional<std::pair<ModelRef, std::shared_ptr<ModelHook>>> take(const void* identity) {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(identity);
    if (found == entries_.end()) return std::nullopt;
    const Entry entry = std::move(found->second);
    entries_.erase(found);
    count_ = entries_.size();
    const auto module = entry.module();
    return module ? std::optional(std::pair(*module, entry.hook)) : std::nullopt;
  }
  bool any() const { return count_.load(std::memory_order_relaxed) > 0; }

 private:
  struct Entry {
    std::weak_ptr<torch::nn::Module> weak;
    std::optional<ModelRef> script;  ///< script modules have no weak references that could be asked cheaply
    std::shared_ptr<ModelHook> hook;

    std::optional<ModelRef> module() const {
      if (script) return script;
      auto alive = weak.lock();
      return alive ? std::optional(ModelRef(std::move(alive))) : std::nullopt;
    }
  };
  std::mutex mutex_;
  std::unordered_map<const void*, Entry> entries_;
  std::atomic<size_t> count_{0};
};

Registry& registry() {
  static Registry instance;
  return instance;
}

/// Own tensors of one module.
NamedTensors own_tensors(const ModelRef& module) {
  NamedTensors own;
  for (const auto& [name, tensor] : module.state())
    if (name.find('.') == std::string::npos) own.emplace_back(name, tensor);
  return own;
}

}  // namespace

namespace detail {
bool any_hooks() { return registry().any(); }
}  // namespace detail

SequentialHook::SequentialHook(std::vector<std::shared_ptr<ModelHook>> hooks) : hooks_(std::move(hooks)) {
  if (std::find(hooks_.begin(), hooks_.end(), nullptr) != hooks_.end())
    throw ConfigError("SequentialHook: found a null hook, expected hooks");
}
bool SequentialHook::no_grad() const {
  return std::any_of(hooks_.begin(), hooks_.end(), [](const auto& hook) { return hook->no_grad(); });
}
void SequentialHook::init_hook(const ModelRef& module) {
  for (const auto& hook : hooks_) hook->init_hook(module);
}
void SequentialHook::pre_forward(const ModelRef& module, std::vector<at::Tensor>& inputs) {
  for (const auto& hook : hooks_) hook->pre_forward(module, inputs);
}
void SequentialHook::post_forward(const ModelRef& module, std::vector<at::Tensor>& outputs) {
  for (const auto& hook : hooks_) hook->post_forward(module, outputs);
}
void SequentialHook::detach_hook(const ModelRef& module) {
  for (const auto& hook : hooks_) hook->detach_hook(module);
}

void add_hook_to_module(const ModelRef& module, std::shared_ptr<ModelHook> hook, bool append) {
  if (!hook)
    throw ConfigError("add_hook_to_module: found a null hook, expected one; remove_hook_from_module removes hooks");
  const auto before = registry().get(module);
  if (before && !append) {
    registry().take(module.identity());
    before->detach_hook(module);
  }
  hook->init_hook(module);
  registry().set(module, before && append ? std::make_shared<SequentialHook>(std::vector{before, std::move(hook)})
                                          : std::move(hook));
}

void remove_hook_from_module(const ModelRef& module, bool recurse) {
  const auto remove = [](const void* identity) {
    if (const auto taken = registry().take(identity)) taken->second->detach_hook(taken->first);
  };
  remove(module.identity());
  if (!recurse) return;
  for (const auto& below : module.submodules()) remove(below.identity);
}

std::shared_ptr<ModelHook> hook_of(const ModelRef& module) { return registry().get(module); }

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
    static_cast<void>(registry().take(identity_));
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

bool has_offloaded_params(const ModelRef& module) {
  const auto own = own_tensors(module);
  return std::any_of(own.begin(), own.end(), [](const auto& item) {
    const auto* member = residency::Member::of(item.second);
    return member && !member->unit().fixed();
  });
}

namespace {

/// Raw pointers leave no trace of what is written through them, so the bytes before and after are compared.
size_t fingerprint(const at::Tensor& tensor) {
  return std::hash<std::string_view>{}({static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()});
}

}  // namespace

struct AlignedModule::Impl {
  residency::Pins offloaded;
  std::vector<std::pair<at::Tensor, size_t>> watched;    ///< tensor of an offloaded unit, its fingerprint
  std::vector<std::pair<at::Tensor, at::Tensor>> moved;  ///< tensor, what it had
};

AlignedModule::AlignedModule(const ModelRef& module, std::optional<at::Device> execution_device)
    : impl_(std::make_unique<Impl>()) {
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : own_tensors(module)) {
    if (auto* member = residency::Member::of(tensor)) {
      if (execution_device && *execution_device != tensor.device())
        throw ConfigError("align_module_device: '" + name + "' is offloaded and computes on " + tensor.device().str() +
                          ", asked for on " + execution_device->str() +
                          ". Copy it: operators fetch what they need, so weight.to(device) works anywhere.");
      const bool watch =
          tensor.is_cpu() && !member->unit().fixed();  // reading a device's memory back would cost more than storing it
      impl_->offloaded.add(member->unit(), /*writes=*/!watch && !member->unit().fixed());
      if (watch) impl_->watched.emplace_back(tensor, fingerprint(tensor));
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
  residency::Pins changed;
  for (const auto& [tensor, before] : impl_->watched)
    if (fingerprint(tensor) != before) changed.add(residency::Member::of(tensor)->unit(), /*writes=*/true);
  for (auto& [tensor, before] : impl_->moved) {
    if (!tensor.is_meta() && !before.is_meta()) before.copy_(tensor);
    bigmodel::replace_values(tensor, before);
  }
}

AlignedModule align_module_device(const ModelRef& module, std::optional<at::Device> execution_device) {
  return AlignedModule(module, execution_device);
}

}  // namespace accelerate
