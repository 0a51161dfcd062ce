#include "bigmodel/file_tree.hpp"
#include "utils/raise.hpp"

#include <algorithm>

namespace accelerate::bigmodel {

void FileTree::count(size_t name_bytes) {
  name_bytes_ += name_bytes;
  if (++entries_ > kMostEntries || name_bytes_ > kMostNameBytes)
    raise<CheckpointError>(
        "{}: it describes more than {} modules and tensors, or more than {} MiB of names, expected fewer in any model. "
        "The file is damaged, or was made so that reading it takes for ever.",
        source_, kMostEntries, kMostNameBytes >> 20);
}

void FileTree::add(const std::string& name, TensorSpec tensor) {
  count(name.size());
  if (std::count(name.begin(), name.end(), '.') > kDeepest)
    raise<CheckpointError>("{}: a tensor has a name of more than {} parts: '{}...'. The file is damaged.", source_,
                           kDeepest, name.substr(0, 60));
  ModuleTree* module = &root_;
  size_t begin = 0;
  for (size_t dot = 0; (dot = name.find('.', begin)) != std::string::npos; begin = dot + 1) {
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
