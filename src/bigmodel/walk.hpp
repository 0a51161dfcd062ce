#pragma once

#include <string>
#include <utility>
#include <vector>

#include "accelerate/bigmodel/sizes.hpp"

/// Ways through a described model that several files need.
namespace accelerate::bigmodel {

inline std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

/// Calls f(dotted name, tensor) for the parameters (or buffers), a module's own before its children's: the order of
/// PyTorch's named_parameters(), with every name of a tied one.
template <class F>
void for_each_tensor(const ModuleTree& module, std::vector<TensorSpec> ModuleTree::*kind, const F& f,
                     const std::string& prefix = "") {
  for (const auto& tensor : module.*kind) f(joined(prefix, tensor.name), tensor);
  for (const auto& child : module.children) for_each_tensor(child, kind, f, joined(prefix, child.name));
}

/// Something that can be placed: a module, or a tensor directly in a module that was split.
struct Placeable {
  std::string name;
  const ModuleTree* module = nullptr;  ///< null for a tensor
};

/// The parameters and children of a module.
std::vector<Placeable> placeables_of(const ModuleTree& module, const std::string& name);
/// The same for the whole model, and its own buffers.
std::vector<Placeable> placeables_of_root(const ModuleTree& tree);

/// Whether the module has children and its class allows taking them apart.
bool can_split(const ModuleTree* module, const std::vector<std::string>& no_split_module_classes);

LargestLayer largest_layer_of(const std::vector<Placeable>& parts, const ModuleSizes& sizes,
                              const std::vector<std::string>& no_split_module_classes);

}  // namespace accelerate::bigmodel
