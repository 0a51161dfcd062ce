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
#include <c10/core/GradMode.h>

#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/nested.hpp"

namespace accelerate {

/// What is done before and after a module's forward. The forward's arguments have any types, so a hook sees their
/// tensors: all of them, in the order of the arguments and depth first, as nested::for_each_tensor finds them. Those
/// that it puts in their place are what the forward gets, or the caller; their number must stay the same.
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

namespace detail {

/// Whether any module of the process has a hook: a look at one number.
ACCELERATE_API bool any_hooks();

/// The hook's pre_forward() and post_forward(). @throws ConfigError when it changed the number of tensors.
ACCELERATE_API void run_pre_forward(ModelHook& hook, const ModelRef& module, std::vector<at::Tensor>& inputs);
ACCELERATE_API void run_post_forward(ModelHook& hook, const ModelRef& module, std::vector<at::Tensor>& outputs);

template <class T>
inline constexpr bool may_hold_tensors = nested::TensorLike<T> || nested::IValueLike<T> || nested::is_container<T>;

/// The argument with the next tensors in the place of its own. What can't hold tensors is passed on as it is.
template <class T> decltype(auto) with_tensors(T&& argument, const std::vector<at::Tensor>& tensors, size_t& next) {
  if constexpr (may_hold_tensors<std::remove_cvref_t<T>>)
    return nested::map_tensors(std::as_const(argument), [&](const at::Tensor&) { return tensors[next++]; });
  else return std::forward<T>(argument);
}

template <class T> void collect_tensors(const T& value, std::vector<at::Tensor>& tensors) {
  if constexpr (may_hold_tensors<T>)
    nested::for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
}

/// forward(args...) with the hook of `model` around it.
template <class Model, class Forward, class... Args>
auto call_with_hooks(const Model& model, Forward&& forward, Args&&... args) {
  using Output = std::decay_t<decltype(forward(std::forward<Args>(args)...))>;
  if (!any_hooks()) return static_cast<Output>(forward(std::forward<Args>(args)...));
  const ModelRef module(model);
  const auto hook = hook_of(module);
  if (!hook) return static_cast<Output>(forward(std::forward<Args>(args)...));
  std::vector<at::Tensor> tensors;
  (collect_tensors(std::as_const(args), tensors), ...);
  run_pre_forward(*hook, module, tensors);
  size_t next = 0;
  // Braces: arguments take their tensors from left to right.
  std::tuple<decltype(with_tensors(std::forward<Args>(args), tensors, next))...> inputs{
      with_tensors(std::forward<Args>(args), tensors, next)...};
  const auto run = [&] {
    const c10::AutoGradMode grad(c10::GradMode::is_enabled() && !hook->no_grad());
    return std::apply(
        [&](auto&&... values) -> decltype(auto) { return forward(std::forward<decltype(values)>(values)...); },
        std::move(inputs));
  };
  tensors.clear();
  if constexpr (std::is_void_v<Output>) {
    run();
    hook->post_forward(module, tensors);
  } else {
    Output output = run();
    collect_tensors(output, tensors);
    run_post_forward(*hook, module, tensors);
    next = 0;
    if constexpr (may_hold_tensors<Output>) return static_cast<Output>(with_tensors(output, tensors, next));
    else return output;
  }
}

}  // namespace detail
}  // namespace accelerate
