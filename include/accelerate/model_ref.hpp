#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/export.hpp"

namespace accelerate {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

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
  void to(const at::Device& device) const;
  /// Equal for references to the same module.
  const void* identity() const;

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::optional<torch::jit::Module> script_;
};

}  // namespace accelerate
