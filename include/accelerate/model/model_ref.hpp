#pragma once

/// Models of any type, where their type does not matter.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/model/model_like.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
struct Submodule;  // accelerate/model/submodule.hpp

/// A module of any kind, seen by its named tensors. Functions of a `const ModelRef&` take every model as it is, also
/// prepared, dispatched and hooked ones. Cheap to copy; shares the module.
class ACCELERATE_API ModelRef {
 public:
  // NOLINTBEGIN(google-explicit-constructor): f(model) takes any model
  ModelRef(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}
  ModelRef(const torch::jit::Module& module);
  template <class Model>
  requires ModelLike<Model> || WrappedModel<Model> ModelRef(const Model& model) {
    if constexpr (WrappedModel<Model>) *this = ModelRef(model.unwrap());
    else if constexpr (detail::ScriptModule<Model>) *this = ModelRef(static_cast<const torch::jit::Module&>(model));
    else if constexpr (detail::ModuleHolderLike<Model>) module_ = model.ptr();
    else module_ = model;
  }
  // NOLINTEND(google-explicit-constructor)

  /// Each tensor once, under its first name: tied weights don't repeat.
  NamedTensors parameters() const;
  NamedTensors buffers() const;
  /// Parameters and buffers by name, as the module's own state, without copies.
  NamedTensors state() const;
  /// The root, then depth first in the order of registration. The caller includes model/submodule.hpp.
  std::vector<Submodule> submodules() const;
  void to(const at::Device& device) const;
  bool is_training() const;      ///< rather than evaluates
  const void* identity() const;  ///< equal for references to the same module
  /// Null for script modules.
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<torch::jit::Module> script_;  ///< a handle of its own; null for torch::nn modules
};

}  // namespace accelerate
