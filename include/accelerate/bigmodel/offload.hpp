#pragma once

/// Weights in a folder, one file each, as the reference's disk offload has them. The format is described in
/// docs/formats/offload_folder.md; Python reads our folders and we read Python's.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The entry of one weight in the index of a folder.
struct OffloadedWeight {
  /// PyTorch's name without "torch."; for a weight in a safetensors file the dtype to convert to, or empty.
  std::string dtype;
  std::vector<int64_t> shape;              ///< empty for a scalar, and for a weight in a safetensors file
  std::filesystem::path safetensors_file;  ///< Empty: the weight is in `<name>.dat` of the folder.
  std::string weight_name;                 ///< its name in the safetensors file, when that differs
};

/// Weights by name, in the order in which they were written.
using OffloadIndex = std::vector<std::pair<std::string, OffloadedWeight>>;

/// Writes the values of one tensor to `folder/<name>.dat` (which appears complete or not at all) and adds it to `index`
/// if that is given. The system is left to bring it to the disk when it likes: a program may crash, but after a power
/// cut remove the folder.
/// @param weight  any device, dense or strided; copied to the CPU
/// @throws CheckpointError for a tensor without data, a dtype that PyTorch's arrays don't know, a name that would leave
/// the folder, a folder that can't be written; ResourceError for a full disk.
ACCELERATE_API void offload_weight(const at::Tensor& weight, const std::string& name,
                                   const std::filesystem::path& folder, OffloadIndex* index = nullptr);

/// Maps the file of one weight: pages are read when they are first touched, and belong to this process alone once
/// written to.
/// @throws CheckpointError when the file is missing or shorter than its shape needs.
ACCELERATE_API at::Tensor load_offloaded_weight(const std::filesystem::path& file, const OffloadedWeight& weight);

/// Adds to `folder/index.json`, which is made when it isn't there; entries of the same names are replaced. Does nothing
/// for an empty index.
ACCELERATE_API void save_offload_index(const OffloadIndex& index, const std::filesystem::path& folder);

/// @throws CheckpointError naming the entry that is malformed or the missing file. A safetensors_file must lie in the
/// folder (an index that the caller makes may name any); files of weights may not be links that lead out of it.
ACCELERATE_API OffloadIndex load_offload_index(const std::filesystem::path& folder);

/// Writes all weights and the index, in the order given; makes the folder.
ACCELERATE_API void offload_state_dict(const std::filesystem::path& folder, const NamedTensors& state_dict);
/// The same for a std::map and for what torch's named_parameters() gives.
template <class StateDict>
requires(!std::is_convertible_v<const StateDict&, NamedTensors>) void offload_state_dict(
    const std::filesystem::path& folder, const StateDict& state_dict) {
  NamedTensors tensors;
  for (const auto& item : state_dict) {
    if constexpr (requires { item.key(); }) tensors.emplace_back(item.key(), item.value());
    else tensors.emplace_back(item.first, item.second);
  }
  offload_state_dict(folder, tensors);
}

struct OffloadedWeightsLoaderOptions {
  std::map<std::string, at::Tensor> state_dict;  ///< Weights in memory; they go before files of the same name.
  std::filesystem::path save_folder;             ///< the folder that offload_state_dict() wrote
  std::optional<OffloadIndex> index;             ///< default: the index of the folder
};

/// Weights by name wherever they are: in memory, in an offload folder, or in the safetensors files that its index
/// names. Files are mapped when a weight is first asked for. Copies share what is open. Safe to use from several
/// threads.
class ACCELERATE_API OffloadedWeightsLoader {
 public:
  /// @throws ConfigError when nothing is given to load from; CheckpointError for a bad index.
  explicit OffloadedWeightsLoader(OffloadedWeightsLoaderOptions options);

  /// On the CPU. @throws CheckpointError naming the nearest weight.
  at::Tensor operator[](const std::string& name) const;
  bool contains(const std::string& name) const;
  /// Those in memory first, then those of the index.
  const std::vector<std::string>& names() const;
  int64_t size() const { return static_cast<int64_t>(names().size()); }

 private:
  struct Content;
  std::shared_ptr<const Content> content_;
};

/// The entries of some modules: those named like them or below them.
template <class Value>
std::map<std::string, Value> extract_submodules_state_dict(const std::map<std::string, Value>& state_dict,
                                                           const std::vector<std::string>& submodule_names) {
  std::map<std::string, Value> result;
  for (const auto& module : submodule_names) {
    if (const auto found = state_dict.find(module); found != state_dict.end()) result.insert(*found);
    const std::string prefix = module + ".";
    for (auto entry = state_dict.lower_bound(prefix); entry != state_dict.end() && entry->first.starts_with(prefix);
         ++entry)
      result.insert(*entry);
  }
  return result;
}

}  // namespace accelerate
