#include "bigmodel/file_tree.hpp"

#include <algorithm>

#include "accelerate/utils/error.hpp"

namespace accelerate::bigmodel {

void FileTree::count(size_t name_bytes) {
  name_bytes_ += name_bytes;
  if (++entries_ > kMostEntries || name_bytes_ > kMostNameBytes)
    throw CheckpointError(source_ + ": it describes more than " + std::to_string(kMostEntries) +
                          " modules and tensors, or more than " + std::to_string(kMostNameBytes >> 20) +
                          " MiB of names, expected fewer in any model. The file is damaged, or was made so that "
                          "reading it takes for ever.");
}

void FileTree::add(const std::string& name, TensorSpec tensor) {
  count(name.size());
  if (std::count(name.begin(), name.end(), '.') > kDeepest)
    throw CheckpointError(source_ + ": a tensor has a name of more than " + std::to_string(kDeepest) + " parts: '" +
                          name.substr(0, 60) + "...'. The file is damaged.");
  ModuleTree* module = &root_;
  size_t begin = 0;
  for (size_t dot; (dot = name.find('.', begin)) != std::string::npos; begin = dot + 1) {
    const auto [place, is_new] = place_.try_emplace(name.substr(0, dot), module->children.size());
    if (is_new) {
      count(dot);
      module->children.push_back({.name = name.substr(begin, dot - begin), .class_name = "Module"});
    }
    module = &module->children[place->second];
  }
  tensor.name = name.substr(begin);
  module->parameters.push_back(std::move(tensor));
}

}  // namespace accelerate::bigmodel
