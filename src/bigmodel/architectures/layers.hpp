#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/bigmodel/sizes.hpp"

/// The vocabulary in which architectures are written down: PyTorch's layers with their parameters.
namespace accelerate::bigmodel {

inline ModuleTree module(std::string name, std::string class_name, std::vector<ModuleTree> children = {}) {
  return {.name = std::move(name), .class_name = std::move(class_name), .children = std::move(children)};
}

inline ModuleTree with_parameters(ModuleTree tree, std::vector<TensorSpec> parameters) {
  tree.parameters = std::move(parameters);
  return tree;
}

/// Buffers that libraries leave out of the state dict.
inline ModuleTree with_buffers(ModuleTree tree, std::vector<TensorSpec> buffers) {
  for (auto& buffer : buffers) buffer.persistent = false;
  tree.buffers = std::move(buffers);
  return tree;
}

inline ModuleTree linear(std::string name, int64_t in, int64_t out, bool bias = true) {
  auto tree = with_parameters(module(std::move(name), "Linear"), {{"weight", {out, in}}});
  if (bias) tree.parameters.push_back({"bias", {out}});
  return tree;
}

inline ModuleTree embedding(std::string name, int64_t count, int64_t dim) {
  return with_parameters(module(std::move(name), "Embedding"), {{"weight", {count, dim}}});
}

inline ModuleTree layer_norm(std::string name, int64_t dim) {
  return with_parameters(module(std::move(name), "LayerNorm"), {{"weight", {dim}}, {"bias", {dim}}});
}

/// A norm without a bias, of a class of the model's own.
inline ModuleTree rms_norm(std::string name, std::string class_name, int64_t dim) {
  return with_parameters(module(std::move(name), std::move(class_name)), {{"weight", {dim}}});
}

inline ModuleTree conv2d(std::string name, int64_t in, int64_t out, int64_t kernel, bool bias = false) {
  auto tree = with_parameters(module(std::move(name), "Conv2d"), {{"weight", {out, in, kernel, kernel}}});
  if (bias) tree.parameters.push_back({"bias", {out}});
  return tree;
}

inline ModuleTree batch_norm(std::string name, int64_t dim) {
  auto tree = with_parameters(module(std::move(name), "BatchNorm2d"), {{"weight", {dim}}, {"bias", {dim}}});
  tree.buffers = {{"running_mean", {dim}}, {"running_var", {dim}}, {"num_batches_tracked", {}, "int64"}};
  return tree;
}

/// `count` times what make(index) gives, named "0", "1", ...
template <class Make>
ModuleTree list_of(std::string name, int64_t count, const Make& make, std::string class_name = "ModuleList") {
  auto tree = module(std::move(name), std::move(class_name));
  for (int64_t i = 0; i < count; ++i) {
    tree.children.push_back(make(i));
    tree.children.back().name = std::to_string(i);
  }
  return tree;
}

}  // namespace accelerate::bigmodel
