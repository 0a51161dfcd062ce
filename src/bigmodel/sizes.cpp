#include "accelerate/bigmodel/sizes.hpp"

#include <algorithm>
#include <unordered_set>

#include "bigmodel/walk.hpp"
#include "utils/raise.hpp"

namespace accelerate {

using bigmodel::for_each_tensor;
using bigmodel::joined;
using bigmodel::Placeable;

namespace {

double elements(const std::vector<int64_t>& shape) {
  double count = 1;
  for (const int64_t size : shape) count *= static_cast<double>(size);
  return count;
}

/// True at the first meeting of a tensor that others share.
class FirstMeeting {
 public:
  bool operator()(const TensorSpec& tensor) { return tensor.identity == 0 || seen_.insert(tensor.identity).second; }

 private:
  std::unordered_set<int64_t> seen_;
};

/// The loader converts floating-point numbers only.
bool keeps_its_dtype(const std::string& dtype) {
  return dtype.starts_with("uint") || dtype.starts_with("int") || dtype.starts_with("bool");
}

TensorSpec* find_tensor(ModuleTree& tree, const std::string& name) {
  ModuleTree* module = &tree;
  size_t begin = 0;
  for (size_t dot = 0; (dot = name.find('.', begin)) != std::string::npos; begin = dot + 1) {
    const auto child = std::find_if(module->children.begin(), module->children.end(),
                                    [&](const auto& c) { return c.name == name.substr(begin, dot - begin); });
    if (child == module->children.end()) return nullptr;
    module = &*child;
  }
  for (auto* kind : {&module->parameters, &module->buffers})
    for (auto& tensor : *kind)
      if (tensor.name == name.substr(begin)) return &tensor;
  return nullptr;
}

}  // namespace

int64_t ModuleTree::numel() const {
  double count = 0;
  FirstMeeting first;
  for_each_tensor(*this, &ModuleTree::parameters, [&](const std::string&, const TensorSpec& tensor) {
    count += first(tensor) ? elements(tensor.shape) : 0;
  });
  constexpr double kMost = 9e18;  // a damaged header can say anything
  return static_cast<int64_t>(std::min(count, kMost));
}

void tie(ModuleTree& tree, const std::string& name, const std::string& other) {
  TensorSpec* const a = find_tensor(tree, name);
  TensorSpec* const b = find_tensor(tree, other);
  for (const auto& [tensor, missing] : {std::pair(a, name), std::pair(b, other)})
    if (!tensor)
      raise<ConfigError>("tie: the model has no tensor '{}'. Give two dotted names of its parameters.", missing);
  int64_t identity = b->identity;
  if (identity == 0) {
    for (const auto kind : {&ModuleTree::parameters, &ModuleTree::buffers})
      for_each_tensor(tree, kind, [&](const std::string&, const TensorSpec& tensor) {
        identity = std::max(identity, tensor.identity);
      });
    ++identity;
  }
  b->identity = a->identity = identity;
  a->shape = b->shape;
  a->dtype = b->dtype;
}

void ModuleSizes::add(const std::string& name, double bytes) {
  const auto [found, is_new] = index_.try_emplace(name, entries_.size());
  if (is_new) entries_.emplace_back(name, 0);
  entries_[found->second].second += bytes;
}

double ModuleSizes::operator[](const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? 0 : entries_[found->second].second;
}

ModuleSizes compute_module_sizes(const ModuleTree& tree, const SizeOptions& options) {
  ModuleSizes sizes;
  const std::optional<double> limit = options.dtype ? std::optional(dtype_byte_size(*options.dtype)) : std::nullopt;
  const auto add = [&](const std::string& name, const TensorSpec& tensor) {
    double bytes = dtype_byte_size(tensor.dtype);
    if (const auto special = options.special_dtypes.find(name); special != options.special_dtypes.end())
      bytes = dtype_byte_size(special->second);
    else if (limit && !keeps_its_dtype(tensor.dtype)) bytes = std::min(bytes, *limit);
    bytes *= elements(tensor.shape);
    sizes.add("", bytes);
    for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1))
      sizes.add(name.substr(0, dot), bytes);
    sizes.add(name, bytes);
  };
  for (const auto kind : {&ModuleTree::parameters, &ModuleTree::buffers}) {
    if (options.buffers_only && kind == &ModuleTree::parameters) continue;
    FirstMeeting first;
    for_each_tensor(tree, kind, [&](const std::string& name, const TensorSpec& tensor) {
      if (first(tensor)) add(name, tensor);
    });
  }
  return sizes;
}

std::vector<std::vector<std::string>> find_tied_parameters(const ModuleTree& tree) {
  std::vector<std::vector<std::string>> groups;
  std::unordered_map<int64_t, size_t> group_of;
  for_each_tensor(tree, &ModuleTree::parameters, [&](const std::string& name, const TensorSpec& tensor) {
    if (tensor.identity == 0) return;
    const auto [found, is_new] = group_of.try_emplace(tensor.identity, groups.size());
    if (is_new) groups.emplace_back();
    groups[found->second].push_back(name);
  });
  std::erase_if(groups, [](const auto& group) { return group.size() < 2; });
  for (auto& group : groups) std::sort(group.begin(), group.end());
  return groups;
}

LargestLayer get_max_layer_size(const ModuleTree& tree, const ModuleSizes& sizes,
                                const std::vector<std::string>& no_split_module_classes) {
  return bigmodel::largest_layer_of(bigmodel::placeables_of_root(tree), sizes, no_split_module_classes);
}

MaximumSizes calculate_maximum_sizes(const ModuleTree& tree, const std::vector<std::string>& no_split_module_classes) {
  const auto sizes = compute_module_sizes(tree);
  return {sizes[""], get_max_layer_size(tree, sizes, no_split_module_classes)};
}

namespace bigmodel {

std::vector<Placeable> placeables_of(const ModuleTree& module, const std::string& name) {
  std::vector<Placeable> parts;
  for (const auto& tensor : module.parameters) parts.push_back({joined(name, tensor.name)});
  for (const auto& child : module.children) parts.push_back({joined(name, child.name), &child});
  return parts;
}

std::vector<Placeable> placeables_of_root(const ModuleTree& tree) {
  auto parts = placeables_of(tree, "");
  for (const auto& tensor : tree.buffers) parts.push_back({tensor.name});
  return parts;
}

bool can_split(const ModuleTree* module, const std::vector<std::string>& no_split_module_classes) {
  return module && !module->children.empty() &&
         std::find(no_split_module_classes.begin(), no_split_module_classes.end(), module->class_name) ==
             no_split_module_classes.end();
}

LargestLayer largest_layer_of(const std::vector<Placeable>& parts, const ModuleSizes& sizes,
                              const std::vector<std::string>& no_split_module_classes) {
  LargestLayer largest;
  const auto look = [&](const auto& self, const ModuleTree* module, const std::string& name) -> void {
    if (can_split(module, no_split_module_classes)) {
      for (const auto& child : module->children) self(self, &child, joined(name, child.name));
      return;
    }
    const double bytes = sizes[name];
    if (bytes > largest.bytes) largest = {bytes, {name}};
    else if (bytes == largest.bytes) largest.names.push_back(name);
  };
  for (const auto& part : parts) look(look, part.module, part.name);
  return largest;
}

}  // namespace bigmodel
}  // namespace accelerate
