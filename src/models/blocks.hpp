#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

namespace accelerate::models {

/// A model's blocks: the members of lists of modules, the outermost ones, that have modules of their own. They are
/// placed and sharded as a whole.
inline std::vector<std::shared_ptr<torch::nn::Module>> blocks_of(const torch::nn::Module& model) {
  std::vector<std::shared_ptr<torch::nn::Module>> blocks;
  const auto walk = [&](const auto& self, const torch::nn::Module& module) -> void {
    const bool is_list = module.as<torch::nn::ModuleListImpl>();
    for (const auto& child : module.children()) {
      if (is_list && !child->as<torch::nn::ModuleListImpl>() && !child->children().empty()) {
        blocks.push_back(child);
      } else {
        self(self, *child);
      }
    }
  };
  walk(walk, model);
  return blocks;
}

inline std::vector<std::string> block_classes(const torch::nn::Module& model) {
  std::set<std::string> classes;
  for (const auto& block : blocks_of(model)) {
    const std::string name = block->name();
    classes.insert(name.substr(name.rfind(':') == std::string::npos ? 0 : name.rfind(':') + 1));
  }
  return {classes.begin(), classes.end()};
}

}  // namespace accelerate::models
