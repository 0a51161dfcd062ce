#pragma once

/// Code around a model's forward.
///
/// LibTorch's modules have no forward hooks, and a call of `net->forward(x)` can't be seen from outside. So hooks of a
/// module run where the call goes through this library:
/// - `m(x)` on what Accelerator::prepare, dispatch_model and their kin return, and on a Hooked<Model>: the hooks of
/// that module;
/// - `accelerate::call(block, x)` in a forward of your own: the hooks of `block`.
/// A plain call of a sub-module inside somebody's forward runs none. callable.hpp has these calls. Placing weights
/// needs no hooks: operators fetch what they touch (residency.hpp).

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Code before and after a module's forward. The forward's arguments have any types, so a hook sees their tensors: all
/// of them, in the order of the arguments and depth first, as nested::for_each_tensor finds them. It may put other
/// tensors in their place, which the forward then gets, or the caller; their number must stay the same.
class ACCELERATE_API ModelHook {
 public:
  virtual ~ModelHook() = default;
  /// The forward runs without recording gradients.
  virtual bool no_grad() const { return false; }
  /// When the hook is added.
  virtual void init_hook(const ModelRef& module) { static_cast<void>(module); }
  virtual void pre_forward(const ModelRef& module, std::vector<at::Tensor>& inputs) {
    static_cast<void>(module), static_cast<void>(inputs);
  }
  virtual void post_forward(const ModelRef& module, std::vector<at::Tensor>& outputs) {
    static_cast<void>(module), static_cast<void>(outputs);
  }
  /// When it is removed.
  virtual void detach_hook(const ModelRef& module) { static_cast<void>(module); }
};

/// Several as one, each in the order given.
class ACCELERATE_API SequentialHook : public ModelHook {
 public:
  explicit SequentialHook(std::vector<std::shared_ptr<ModelHook>> hooks);
  bool no_grad() const override;
  void init_hook(const ModelRef& module) override;
  void pre_forward(const ModelRef& module, std::vector<at::Tensor>& inputs) override;
  void post_forward(const ModelRef& module, std::vector<at::Tensor>& outputs) override;
  void detach_hook(const ModelRef& module) override;

 private:
  std::vector<std::shared_ptr<ModelHook>> hooks_;
};

/// Gives the module a hook. A module has one: a second takes its place (the first is detached), or with `append` runs
/// after it. Lives as long as the module (a script module lives as long as its hook). Any thread.
/// @throws ConfigError for null.
ACCELERATE_API void add_hook_to_module(const ModelRef& module, std::shared_ptr<ModelHook> hook, bool append = false);
/// Detaches and forgets the module's hook, with `recurse` also those of all modules below it. Does nothing where there
/// is none.
ACCELERATE_API void remove_hook_from_module(const ModelRef& module, bool recurse = false);
/// Null when there is none.
ACCELERATE_API std::shared_ptr<ModelHook> hook_of(const ModelRef& module);

/// The module's hook and those below it.
inline void remove_hook_from_submodules(const ModelRef& module) { remove_hook_from_module(module, /*recurse=*/true); }

}  // namespace accelerate
