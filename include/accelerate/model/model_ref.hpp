#pragma once

/// Models of any type, where their type does not matter.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/model/model_like.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// A place in a model's tree of modules. A module that is registered at several places appears at each of them.
struct Submodule {
  /// Dotted name from the root, which is "".
  std::string path;
  /// The class's own name, without namespaces, template arguments and the `Impl` of LibTorch's module holders:
  /// "BertLayer".
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
};

/// A module of any kind, seen by its named tensors. What takes a `const ModelRef&` takes every model as it is, also
/// prepared, dispatched and hooked ones. Cheap to copy; shares the module.
class ACCELERATE_API ModelRef {
 public:
  ModelRef(std::shared_ptr<torch::nn::Module> module)  // NOLINT(google-explicit-constructor): f(model) takes any model
      : module_(std::move(module)) {}
  ModelRef(const torch::jit::Module& module);  // NOLINT(google-explicit-constructor)
  template <class Model>
  requires ModelLike<Model> || WrappedModel<Model> ModelRef(
      const Model& model) {  // NOLINT(google-explicit-constructor)
    if constexpr (WrappedModel<Model>) *this = ModelRef(model.unwrap());
    else if constexpr (detail::ScriptModule<Model>) *this = ModelRef(static_cast<const torch::jit::Module&>(model));
    else if constexpr (detail::ModuleHolderLike<Model>) module_ = model.ptr();
    else module_ = model;
  }

  /// Each tensor once, under its first name: tied weights don't repeat.
  NamedTensors parameters() const;
  NamedTensors buffers() const;
  /// Parameters and buffers by name, as the module's own state, without copies.
  NamedTensors state() const;
  /// The root, then depth first in the order of registration: a module comes before its children.
  std::vector<Submodule> submodules() const;
  void to(const at::Device& device) const;
  /// Rather than evaluates.
  bool is_training() const;
  /// Equal for references to the same module.
  const void* identity() const;
  /// Null for script modules.
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<torch::jit::Module> script_;  ///< a handle of its own; null for torch::nn modules
};

}  // namespace accelerate
