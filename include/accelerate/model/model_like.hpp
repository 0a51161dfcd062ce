#pragma once

/// Models by their own types: what a template takes where ModelRef is for functions.

#include <ATen/core/ivalue.h>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/model/model_ref.hpp"

namespace accelerate {

namespace detail {

template <class M>
concept ModuleHolderLike = requires(const M& m) {
  typename M::ContainedType;
  { m.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
};
template <class M>
concept ModulePointer = requires(const M& m) {
  typename M::element_type;
  requires std::derived_from<typename M::element_type, torch::nn::Module>;
  requires std::same_as<M, std::shared_ptr<typename M::element_type>>;
};
template <class M>
concept ScriptModule = std::derived_from<M, torch::jit::Module>;

}  // namespace detail

/// A torch::nn::ModuleHolder, a std::shared_ptr to a subclass of torch::nn::Module, or a torch::jit::Module.
template <class M>
concept ModelLike = detail::ModuleHolderLike<M> || detail::ModulePointer<M> || detail::ScriptModule<M>;

template <ModelLike Model> ModelRef model_ref(const Model& model) {
  if constexpr (detail::ModuleHolderLike<Model>) return ModelRef(std::shared_ptr<torch::nn::Module>(model.ptr()));
  else return ModelRef(model);
}

/// The model's own forward.
template <ModelLike Model, class... Args> decltype(auto) call_forward(Model& model, Args&&... args) {
  if constexpr (detail::ScriptModule<Model>) {
    if constexpr (sizeof...(Args) == 1 && (std::is_same_v<std::decay_t<Args>, std::vector<c10::IValue>> && ...))
      return model.forward(std::forward<Args>(args)...);
    else return model.forward(std::vector<c10::IValue>{c10::IValue(std::forward<Args>(args))...});
  } else if constexpr (detail::ModuleHolderLike<Model>) {
    return model.ptr()->forward(std::forward<Args>(args)...);
  } else {
    return model->forward(std::forward<Args>(args)...);
  }
}

}  // namespace accelerate
