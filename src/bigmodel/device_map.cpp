#include "accelerate/bigmodel/device_map.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "accelerate/config.hpp"
#include "bigmodel/walk.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// The keys below a module: all that begin with "name.", or all keys for the root.
std::pair<DeviceMap::iterator, DeviceMap::iterator> below(DeviceMap& map, const std::string& module) {
  if (module.empty()) return {map.begin(), map.end()};
  return {map.lower_bound(module + "."), map.lower_bound(module + "/")};  // '/' is the character after '.'
}

void clean(DeviceMap& map, const std::string& module) {
  const auto [begin, end] = below(map, module);
  if (begin != end && std::next(begin) != end &&
      std::all_of(begin, end, [first = begin->second](const auto& entry) { return entry.second == first; })) {
    const Place place = begin->second;
    map.erase(begin, end);
    map.insert_or_assign(module, place);
    return;
  }
  std::set<std::string> children;
  const size_t skip = module.empty() ? 0 : module.size() + 1;
  for (auto entry = begin; entry != end; ++entry)
    if (const auto dot = entry->first.find('.', skip); dot != std::string::npos)
      children.insert(entry->first.substr(0, dot));
  for (const auto& child : children) clean(map, child);
}

/// Names of modules and tensors that have nothing below them in `names`.
std::vector<std::string> leaves_of(const std::vector<std::string>& names) {
  std::set<std::string> parents;
  for (const auto& name : names)
    if (const auto dot = name.rfind('.'); dot != std::string::npos) parents.insert(name.substr(0, dot));
  std::vector<std::string> leaves;
  std::copy_if(names.begin(), names.end(), std::back_inserter(leaves),
               [&](const std::string& name) { return !name.empty() && !parents.contains(name); });
  return leaves;
}

/// The size of the largest module of these classes; the first instance stands for its class.
double largest_unsplittable(const ModuleTree& tree, const ModuleSizes& sizes, const std::vector<std::string>& classes) {
  std::map<std::string, std::string> class_of;
  const auto walk = [&](const auto& self, const ModuleTree& module, const std::string& name) -> void {
    class_of.emplace(name, module.class_name);
    for (const auto& child : module.children) self(self, child, bigmodel::joined(name, child.name));
  };
  walk(walk, tree, "");
  std::set<std::string> missing(classes.begin(), classes.end());
  double largest = 0;
  for (const auto& [name, bytes] : sizes.entries())
    if (const auto found = class_of.find(name);
        !name.empty() && found != class_of.end() && missing.erase(found->second) > 0)
      largest = std::max(largest, bytes);
  return largest;
}

}  // namespace

Place::Place(int64_t gpu) : kind_(Kind::gpu), gpu_(gpu) {
  if (gpu < 0) raise<ConfigError>("device {}: a GPU has a number of 0 or more.", gpu);
}

Place::Place(std::string_view name) {
  std::string_view number = name;
  if (number.starts_with("cuda:")) number.remove_prefix(5);
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), gpu_);
  if (name == "mps") kind_ = Kind::mps;
  else if (name == "cpu") kind_ = Kind::cpu;
  else if (name == "disk") kind_ = Kind::disk;
  else if (name == "cuda" || (error == std::errc() && end == number.data() + number.size() && gpu_ >= 0))
    kind_ = Kind::gpu;
  else
    raise<ConfigError>("there is no device '{}'. Devices are numbers of GPUs (0, 1, ...), 'cpu', 'disk' and 'mps'.",
                       name);
}

std::string Place::str() const {
  switch (kind_) {
    case Kind::gpu:
      return std::to_string(gpu_);
    case Kind::mps:
      return "mps";
    case Kind::cpu:
      return "cpu";
    case Kind::disk:
      return "disk";
  }
  return "";
}

MaxMemory get_balanced_memory(const ModuleTree& tree, const BalancedMemoryOptions& options) {
  MaxMemory memory = options.max_memory ? *options.max_memory : get_max_memory();
  std::vector<Place> gpus;
  for (const auto& [place, limit] : memory)
    if (place.is_gpu() && limit.bytes > 0) gpus.push_back(place);
  if (gpus.empty()) return memory;
  // One GPU can't be spared. The computation needs room as well: unless the user has said how much, a
  // tenth.
  const bool low_zero = options.low_zero && gpus.size() > 1;
  constexpr double kShareForWeights = 0.9;
  if (gpus.size() == 1 && !options.max_memory)
    memory.at(gpus.front()).bytes = std::floor(memory.at(gpus.front()).bytes * kShareForWeights);

  const auto sizes = compute_module_sizes(tree, {.dtype = options.dtype, .special_dtypes = options.special_dtypes});
  // Equal shares would be too small, because layers don't divide evenly: a quarter more than the largest block, or than
  // the mean layer, comes on top.
  std::vector<std::string> names, modules;
  for (const auto& [name, bytes] : sizes.entries()) names.push_back(name);
  const auto tensors = leaves_of(names);
  const std::set<std::string> is_tensor(tensors.begin(), tensors.end());
  std::copy_if(names.begin(), names.end(), std::back_inserter(modules),
               [&](const auto& name) { return !is_tensor.contains(name); });
  const auto layers = leaves_of(modules);
  double mean = 0;
  for (const auto& layer : layers) mean += sizes[layer];
  mean = std::floor(mean / static_cast<double>(std::max<size_t>(layers.size(), 1)));
  const double margin =
      std::floor(1.25 * std::max(largest_unsplittable(tree, sizes, options.no_split_module_classes), mean));
  const double share = std::floor(sizes[""] / static_cast<double>(gpus.size() - (low_zero ? 1 : 0))) + margin;

  const Place zero(0);
  for (size_t i = 0; i + 1 < gpus.size(); ++i)
    if (!(low_zero && gpus[i] == zero)) memory.at(gpus[i]).bytes = std::min(share, memory.at(gpus[i]).bytes);
  if (const auto spared = memory.find(zero); low_zero && spared != memory.end()) {
    double elsewhere = 0;
    for (const auto& gpu : gpus)
      if (gpu != zero) elsewhere += memory.at(gpu).bytes;
    spared->second.bytes = std::min(std::max(0.0, sizes[""] - elsewhere), spared->second.bytes);
  }
  return memory;
}

DeviceMap make_device_map(const ModuleTree& tree, const std::string& strategy, DeviceMapOptions options) {
  const std::vector<std::string> strategies = {"auto", "balanced", "balanced_low_0", "sequential"};
  if (std::find(strategies.begin(), strategies.end(), strategy) == strategies.end()) {
    const auto nearest = nearest_name(strategy, strategies);
    raise<ConfigError>(
        "device_map '{}': expected auto, balanced, balanced_low_0 or sequential, or a map from names to devices.{}",
        strategy, nearest ? fmt::format(" Did you mean '{}'?", *nearest) : "");
  }
  if (strategy != "sequential")
    options.max_memory = get_balanced_memory(tree, {.max_memory = options.max_memory,
                                                    .no_split_module_classes = options.no_split_module_classes,
                                                    .dtype = options.dtype,
                                                    .special_dtypes = options.special_dtypes,
                                                    .low_zero = strategy == "balanced_low_0"});
  return infer_auto_device_map(tree, options);
}

DeviceMap clean_device_map(DeviceMap device_map) {
  clean(device_map, "");
  return device_map;
}

std::vector<std::string> check_device_map(const ModuleTree& tree, const DeviceMap& device_map) {
  std::set<std::string> known{""};
  const auto walk = [&](const auto& self, const ModuleTree& module, const std::string& name) -> void {
    known.insert(name);
    for (const auto& child : module.children) self(self, child, bigmodel::joined(name, child.name));
  };
  walk(walk, tree, "");
  // In the order of the state dict: a module's parameters and buffers, then its children's.
  std::vector<std::string> missing;
  const auto check = [&](const auto& self, const ModuleTree& module, const std::string& prefix) -> void {
    for (const auto* tensors : {&module.parameters, &module.buffers})
      for (const auto& tensor : *tensors) {
        const auto name = bigmodel::joined(prefix, tensor.name);
        known.insert(name);
        const bool is_state = tensors == &module.parameters || tensor.persistent;
        if (is_state && !place_of(device_map, name)) missing.push_back(name);
      }
    for (const auto& child : module.children) self(self, child, bigmodel::joined(prefix, child.name));
  };
  check(check, tree, "");
  if (!missing.empty())
    raise<ConfigError>(
        "The device_map provided does not give any device for the following parameters: {}. Name them or the modules "
        "that they are in, or \"\" for all that is not named.",
        fmt::join(missing, ", "));
  std::vector<std::string> unknown;
  for (const auto& [name, place] : device_map)
    if (!known.contains(name)) unknown.push_back(name);
  return unknown;
}

std::optional<Place> place_of(const DeviceMap& device_map, const std::string& name) {
  for (std::string key = name;; key.resize(key.rfind('.') == std::string::npos ? 0 : key.rfind('.'))) {
    if (const auto found = device_map.find(key); found != device_map.end()) return found->second;
    if (key.empty()) return std::nullopt;
  }
}

}  // namespace accelerate
