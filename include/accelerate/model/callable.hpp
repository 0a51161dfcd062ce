#pragma once

/// Calling models: your module's own forward, the same with its hooks, and the base of the handles that prepare() and
/// its kin return.

#include <ATen/core/ivalue.h>

#include <concepts>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/model/hooks.hpp"
#include "accelerate/model/model_like.hpp"

namespace accelerate {

namespace detail {

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

/// What the model's forward takes, C++'s conversions included.
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
/// are your own module, and calling its forward directly leaves out what the handle does. Cheap to copy; copies share
/// the model.
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
