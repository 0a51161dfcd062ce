#pragma once

#include "accelerate/bigmodel/sizes.hpp"
#include "runner.hpp"

namespace conformance {

/// A tree as the case files write it: {"cls", "p": [[name, shape, dtype]], "b": [[name, shape, dtype, persistent]],
/// "c": [[name, tree]]}.
inline accelerate::ModuleTree tree_of(const json& node, const std::string& name = "") {
  accelerate::ModuleTree tree{.name = name, .class_name = node.at("cls").get<std::string>()};
  for (const json& p : node.value("p", json::array()))
    tree.parameters.push_back({.name = p[0], .shape = p[1], .dtype = p[2]});
  for (const json& b : node.value("b", json::array()))
    tree.buffers.push_back({.name = b[0], .shape = b[1], .dtype = b[2], .persistent = b[3]});
  for (const json& c : node.value("c", json::array())) tree.children.push_back(tree_of(c[1], c[0]));
  return tree;
}

inline accelerate::ModuleTree tree_of_model(const json& model) {
  auto tree = tree_of(model.at("tree"));
  for (const json& pair : model.value("ties", json::array())) accelerate::tie(tree, pair[0], pair[1]);
  return tree;
}

/// All models of module_trees.json.
inline const std::map<std::string, accelerate::ModuleTree>& models() {
  static const auto all = [] {
    std::map<std::string, accelerate::ModuleTree> result;
    const json file = companion("module_trees");
    for (const auto& [name, model] : file.at("models").items()) result.emplace(name, tree_of_model(model));
    return result;
  }();
  return all;
}

}  // namespace conformance
