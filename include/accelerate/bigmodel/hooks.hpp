#pragma once

/// Code around a model's forward, and access to parameters whose bytes are elsewhere.
///
/// LibTorch's modules have no forward hooks, and a call of `net->forward(x)` can't be seen from outside. So hooks of a
/// module run where the call goes through this library:
/// - `m(x)` on what Accelerator::prepare, dispatch_model and their kin return, and on a Hooked<Model>: the hooks of
/// that module;
/// - `accelerate::call(block, x)` in a forward of your own: the hooks of `block`.
/// A plain call of a sub-module inside somebody's forward runs none. Placing weights needs no hooks here: operators
/// fetch what they touch (residency.hpp).

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/model/model_like.hpp"
#include "accelerate/utils/error.hpp"
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

template <ModelLike Model>
void add_hook_to_module(const Model& module, std::shared_ptr<ModelHook> hook, bool append = false) {
  add_hook_to_module(model_ref(module), std::move(hook), append);
}
template <ModelLike Model> void remove_hook_from_module(const Model& module, bool recurse = false) {
  remove_hook_from_module(model_ref(module), recurse);
}
/// The module's hook and those below it.
template <ModelLike Model> void remove_hook_from_submodules(const Model& module) {
  remove_hook_from_module(model_ref(module), /*recurse=*/true);
}

namespace detail {

/// Whether any module of the process has a hook: a look at one number.
ACCELERATE_API bool any_hooks();

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

inline void check_count(const char* when, size_t before, size_t now) {
  if (before != now)
    throw ConfigError(std::string("hook: ") + when + " changed the number of tensors from " + std::to_string(before) +
                      " to " + std::to_string(now) + "; put others in their places instead");
}

/// forward(args...) with the hook of `module()` around it.
template <class GetModule, class Forward, class... Args>
auto call_with_hooks(GetModule&& module, Forward&& forward, Args&&... args) {
  using Output = std::decay_t<decltype(forward(std::forward<Args>(args)...))>;
  if (!any_hooks()) return static_cast<Output>(forward(std::forward<Args>(args)...));
  const ModelRef& ref = module();
  const auto hook = hook_of(ref);
  if (!hook) return static_cast<Output>(forward(std::forward<Args>(args)...));
  std::vector<at::Tensor> tensors;
  (collect_tensors(std::as_const(args), tensors), ...);
  const size_t count = tensors.size();
  hook->pre_forward(ref, tensors);
  check_count("pre_forward", count, tensors.size());
  size_t next = 0;
  // Braces: arguments take their tensors from left to right.
  std::tuple<decltype(with_tensors(std::forward<Args>(args), tensors, next))...> inputs{
      with_tensors(std::forward<Args>(args), tensors, next)...};
  const auto run = [&] {
    const c10::AutoGradMode grad(at::GradMode::is_enabled() && !hook->no_grad());
    return std::apply(
        [&](auto&&... values) -> decltype(auto) { return forward(std::forward<decltype(values)>(values)...); },
        std::move(inputs));
  };
  tensors.clear();
  if constexpr (std::is_void_v<Output>) {
    run();
    hook->post_forward(ref, tensors);
  } else {
    Output output = run();
    collect_tensors(output, tensors);
    const size_t results = tensors.size();
    hook->post_forward(ref, tensors);
    check_count("post_forward", results, tensors.size());
    next = 0;
    if constexpr (may_hold_tensors<Output>) return static_cast<Output>(with_tensors(output, tensors, next));
    else return output;
  }
}

}  // namespace detail

/// Runs the module's forward with its hooks: for sub-modules in a forward of your own.
template <ModelLike Model, class... Args> auto call(Model& module, Args&&... args) {
  return detail::call_with_hooks([&] { return model_ref(module); },
                                 [&](auto&&... inputs) -> decltype(auto) {
                                   return call_forward(module, std::forward<decltype(inputs)>(inputs)...);
                                 },
                                 std::forward<Args>(args)...);
}

/// A model whose calls run its hooks. Cheap to copy; copies share the model.
template <ModelLike Model> class Hooked {
 public:
  explicit Hooked(Model model) : model_(std::move(model)) {}
  template <class... Args> auto operator()(Args&&... args) const { return call(model_, std::forward<Args>(args)...); }
  const Model& unwrap() const { return model_; }
  auto operator->() const { return model_.operator->(); }

 private:
  mutable Model model_;
};

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
  auto hook = cpu_offload_with_hook(model_ref(model), execution_device, prev_module_hook);
  return {Hooked<Model>(model), std::move(hook)};
}

/// Whether a parameter or buffer of this module, not of those below it, is offloaded: its bytes come and go. Weights
/// that lie in a mapped file don't.
ACCELERATE_API bool has_offloaded_params(const ModelRef& module);
template <ModelLike Model> bool has_offloaded_params(const Model& module) {
  return has_offloaded_params(model_ref(module));
}

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
template <ModelLike Model>
[[nodiscard]] AlignedModule align_module_device(const Model& module,
                                                std::optional<at::Device> execution_device = std::nullopt) {
  return align_module_device(model_ref(module), execution_device);
}

}  // namespace accelerate
