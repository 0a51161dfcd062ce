#pragma once

/// Calling models: your module's own forward, the same with its hooks, and the base of handles on models.

#include <ATen/core/ivalue.h>
#include <c10/core/GradMode.h>

#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/nested.hpp"

namespace accelerate {

class ModelHook;  // accelerate/model/hooks.hpp

namespace detail {
ACCELERATE_API bool any_hooks();  ///< of any module of the process: a look at one number
ACCELERATE_API std::shared_ptr<ModelHook> find_hook(const ModelRef& module);  ///< null: it has none
ACCELERATE_API bool runs_without_grad(const ModelHook& hook);
/// Its pre_forward() and post_forward(); last: without results. @throws ConfigError for another number of tensors
ACCELERATE_API void run_pre_forward(ModelHook& hook, const ModelRef& module, std::vector<at::Tensor>& inputs);
ACCELERATE_API void run_post_forward(ModelHook& hook, const ModelRef& module, std::vector<at::Tensor>& outputs);
ACCELERATE_API void run_post_forward(ModelHook& hook, const ModelRef& module);

template <class T>
inline constexpr bool may_hold_tensors = nested::TensorLike<T> || nested::IValueLike<T> || nested::is_container<T>;
/// The argument with the next tensors in the place of its own; one that can't hold tensors as it is.
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
  const auto hook = any_hooks() ? find_hook(model) : nullptr;
  if (!hook) return static_cast<Output>(forward(std::forward<Args>(args)...));
  const ModelRef module(model);
  std::vector<at::Tensor> tensors;
  (collect_tensors(std::as_const(args), tensors), ...);
  run_pre_forward(*hook, module, tensors);
  size_t next = 0;
  // Braces: arguments take their tensors from left to right.
  std::tuple<decltype(with_tensors(std::forward<Args>(args), tensors, next))...> inputs{
      with_tensors(std::forward<Args>(args), tensors, next)...};
  const auto run = [&] {
    const c10::AutoGradMode grad(c10::GradMode::is_enabled() && !runs_without_grad(*hook));
    return std::apply(
        [&](auto&&... values) -> decltype(auto) { return forward(std::forward<decltype(values)>(values)...); },
        std::move(inputs));
  };
  tensors.clear();
  if constexpr (std::is_void_v<Output>) {
    run();
    run_post_forward(*hook, module);
  } else {
    Output output = run();
    collect_tensors(output, tensors);
    run_post_forward(*hook, module, tensors);
    next = 0;
    if constexpr (may_hold_tensors<Output>) return static_cast<Output>(with_tensors(output, tensors, next));
    else return output;
  }
}

/// The module behind a model of any kind: what `->` leads to.
template <ModelLike Model> auto* module_of(Model& model) {
  if constexpr (ScriptModule<Model>) return &model;
  else if constexpr (ModuleHolderLike<Model>) return model.ptr().get();
  else return model.get();
}

/// The arguments as they stand for those of a script module, which takes a list of IValues.
template <class... Args>
concept OneList = sizeof...(Args) == 1 && (std::same_as<std::remove_cvref_t<Args>, std::vector<c10::IValue>> && ...);

/// A holder with a forward of its own, as the Auto classes of accelerate::models are.
template <class Model, class... Args>
concept HolderTakes = ModuleHolderLike<Model> && requires(Model& model, Args&&... args) {
  model.forward(std::forward<Args>(args)...);
};

/// The model's forward takes these arguments, C++'s conversions included.
template <class Model, class... Args>
concept ForwardTakes = (ScriptModule<Model> &&
                        (OneList<Args...> || (std::constructible_from<c10::IValue, Args> && ...))) ||
                       HolderTakes<Model, Args...> || (!ScriptModule<Model> && requires(Model & model, Args&&... args) {
                         module_of(model)->forward(std::forward<Args>(args)...);
                       });

}  // namespace detail

/// The model's own forward.
template <ModelLike Model, class... Args> decltype(auto) call_forward(Model& model, Args&&... args) {
  static_assert(detail::ForwardTakes<Model, Args...>,
                "the model's forward does not take these arguments: compare their number, types and constness with "
                "its declaration");
  if constexpr (detail::ScriptModule<Model> && !detail::OneList<Args...>)
    return model.forward(std::vector<c10::IValue>{c10::IValue(std::forward<Args>(args))...});
  else if constexpr (detail::HolderTakes<Model, Args...>) return model.forward(std::forward<Args>(args)...);
  else return detail::module_of(model)->forward(std::forward<Args>(args)...);
}

/// Runs the module's forward with its hooks: for sub-modules in a forward of your own.
template <ModelLike Model, class... Args> auto call(Model& module, Args&&... args) {
  const auto forward = [&](auto&&... inputs) -> decltype(auto) {
    return call_forward(module, std::forward<decltype(inputs)>(inputs)...);
  };
  if constexpr (detail::ForwardTakes<Model, Args...>)
    return detail::call_with_hooks(module, forward, std::forward<Args>(args)...);
  else call_forward(module, std::forward<Args>(args)...);  // refuses them, and nothing else does again
}

/// A model behind a handle that is called in its place. `h(args...)` is `h.forward(args...)`, which each kind of Handle
/// (the class that derives from this one) defines: by default the module's forward with its hooks. `h->...` and `*h`
/// are your own module; calling its forward directly leaves out what the handle does. Cheap to copy; shares the model.
template <class Handle, ModelLike Model> class Callable {
 public:
  using model_type = Model;

  explicit Callable(Model model) : model_(std::move(model)) {}

  template <class... Args> auto operator()(Args&&... args) const {
    if constexpr (detail::ForwardTakes<Model, Args...>)
      return static_cast<const Handle&>(*this).forward(std::forward<Args>(args)...);
    else call_forward(model_, std::forward<Args>(args)...);  // refuses them, and nothing else does again
  }
  template <class... Args> auto forward(Args&&... args) const { return call(model_, std::forward<Args>(args)...); }

  auto* operator->() const { return detail::module_of(model_); }
  auto& operator*() const { return *detail::module_of(model_); }
  /// The object that the handle was made of.
  const Model& unwrap() const { return model_; }

 protected:
  Model& model() const { return model_; }

 private:
  mutable Model model_;  ///< a handle itself; its forward is not const
};

/// A model whose calls run its hooks.
template <ModelLike Model> class Hooked : public Callable<Hooked<Model>, Model> {
 public:
  explicit Hooked(Model model) : Callable<Hooked<Model>, Model>(std::move(model)) {}
};

}  // namespace accelerate
