#include "accelerate/model/hooks.hpp"

#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "accelerate/model/submodule.hpp"
#include "model/hook_registry.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// Hooks by module. LibTorch's modules have no room for anything; hooks of a module that is gone are thrown out when
/// another is added.
class HookRegistry {
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
    if (module.module()) entry.weak = module.module();
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

HookRegistry& registry() {
  static HookRegistry instance;
  return instance;
}

void check_count(const char* when, size_t before, size_t now) {
  if (before != now)
    raise<ConfigError>("hook: {} changed the number of tensors from {} to {}; put others in their places instead", when,
                       before, now);
}

}  // namespace

namespace detail {

bool any_hooks() { return registry().any(); }
std::shared_ptr<ModelHook> find_hook(const ModelRef& module) { return hook_of(module); }
bool runs_without_grad(const ModelHook& hook) { return hook.no_grad(); }
void run_post_forward(ModelHook& hook, const ModelRef& module) {
  std::vector<at::Tensor> none;
  hook.post_forward(module, none);
}

std::optional<std::pair<ModelRef, std::shared_ptr<ModelHook>>> take_hook(const void* identity) {
  return registry().take(identity);
}

void run_pre_forward(ModelHook& hook, const ModelRef& module, std::vector<at::Tensor>& inputs) {
  const size_t count = inputs.size();
  hook.pre_forward(module, inputs);
  check_count("pre_forward", count, inputs.size());
}

void run_post_forward(ModelHook& hook, const ModelRef& module, std::vector<at::Tensor>& outputs) {
  const size_t count = outputs.size();
  hook.post_forward(module, outputs);
  check_count("post_forward", count, outputs.size());
}

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

}  // namespace accelerate
