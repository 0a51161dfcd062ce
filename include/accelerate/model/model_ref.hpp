#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

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

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::optional<torch::jit::Module> script_;
};

}  // namespace accelerate
