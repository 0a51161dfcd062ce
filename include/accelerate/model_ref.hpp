#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/export.hpp"

namespace accelerate {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// A place in a model's tree of modules. A module that is registered at several places appears at each of them.
struct Submodule {
  /// Dotted name from the root, which is "".
  std::string path;
  /// The class's own name, without namespaces, template arguments and the `Impl` of LibTorch's module holders: "BertLayer".
  std::string class_name;
  /// The C++ type ("mymodels::BertLayerImpl") or the script type ("__torch__.mymodels.BertLayer").
  std::string qualified_class_name;
  /// Its own, without its children's; names are relative to it.
  NamedTensors parameters;
  /// Index in the list of the module that it is registered in; -1 for the root.
  int64_t parent = -1;
  /// Equal at all places of one module; ModelRef::identity() of a reference to it.
  const void* identity = nullptr;
  /// Null for script modules. Valid as long as the model is.
  torch::nn::Module* module = nullptr;
  std::optional<torch::jit::Module> script;

  class ModelRef reference() const;
};

/// A module of any kind, seen by its named tensors.
class ACCELERATE_API ModelRef {
 public:
  explicit ModelRef(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}
  explicit ModelRef(const torch::jit::Module& module) : script_(module) {}

  /// Each tensor once, under its first name: tied weights don't repeat.
  NamedTensors parameters() const;
  NamedTensors buffers() const;
  /// Parameters and buffers by name, as the module's own state, without copies.
  NamedTensors state() const;
  /// The root, then depth first in the order of registration: a module comes before its children.
  std::vector<Submodule> submodules() const;
  void to(const at::Device& device) const;
  /// Equal for references to the same module.
  const void* identity() const;
  /// A function that says whether the module still exists; it does not keep it alive.
  std::function<bool()> liveness() const;

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::optional<torch::jit::Module> script_;
};

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

template <ModelLike Model>
ModelRef model_ref(const Model& model) {
  if constexpr (detail::ModuleHolderLike<Model>) return ModelRef(std::shared_ptr<torch::nn::Module>(model.ptr()));
  else return ModelRef(model);
}

/// The model's own forward.
template <ModelLike Model, class... Args>
decltype(auto) call_forward(Model& model, Args&&... args) {
  if constexpr (detail::ScriptModule<Model>) {
    if constexpr (sizeof...(Args) == 1 && (std::is_same_v<std::decay_t<Args>, std::vector<c10::IValue>> && ...)) return model.forward(std::forward<Args>(args)...);
    else return model.forward(std::vector<c10::IValue>{c10::IValue(std::forward<Args>(args))...});
  } else if constexpr (detail::ModuleHolderLike<Model>) {
    return model.ptr()->forward(std::forward<Args>(args)...);
  } else {
    return model->forward(std::forward<Args>(args)...);
  }
}

}  // namespace accelerate
