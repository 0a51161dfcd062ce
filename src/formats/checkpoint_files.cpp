#include <algorithm>
#include <set>

#include "accelerate/formats/safetensors.hpp"
#include "formats/index_file.hpp"
#include "formats/input_file.hpp"
#include "formats/torch_archive.hpp"
#include "input/read_file.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kPickledWeights = "pytorch_model.bin";
constexpr const char* kPickledIndex = "pytorch_model.bin.index.json";

/// The tensors of an index, from shards that `open` opens, each once. All that is missing is named.
template <class Tensor, class Open, class Find>
std::map<std::string, Tensor> tensors_of(const fs::path& index, Open&& open, Find&& find) {
  const auto weight_map = formats::read_index(index);
  std::map<std::string, decltype(open(index))> files;
  std::vector<std::string> missing;
  std::set<std::string> shards;
  for (const auto& [name, shard] : weight_map) shards.insert(shard);
  for (const auto& shard : shards)
    if (!is_there(index.parent_path() / shard)) missing.push_back(fmt::format("the shard '{}' is not there", shard));
  if (!missing.empty())
    raise<CheckpointError>("checkpoint index '{}': {}. Copy or download all shards into the folder of the index.",
                           index.string(), fmt::join(missing, ", "));
  for (const auto& shard : shards) files.emplace(shard, open(index.parent_path() / shard));
  std::map<std::string, Tensor> tensors;
  for (const auto& [name, shard] : weight_map) {
    if (const auto* found = find(files.at(shard), name)) tensors.emplace(name, *found);
    else missing.push_back(fmt::format("tensor '{}' should be in '{}', which lacks it", name, shard));
  }
  if (!missing.empty())
    raise<CheckpointError>("checkpoint index '{}': {}. Index and shards are of different checkpoints.", index.string(),
                           fmt::join(missing, ", "));
  return tensors;
}

std::map<std::string, SafetensorsFile> open_index(const fs::path& path) {
  return tensors_of<SafetensorsFile>(
      path, [](const fs::path& shard) { return SafetensorsFile(shard); },
      [](const SafetensorsFile& file, const std::string& name) { return file.contains(name) ? &file : nullptr; });
}

std::map<std::string, SafetensorsFile> open_file(const fs::path& path) {
  const SafetensorsFile file(path);
  std::map<std::string, SafetensorsFile> tensors;
  for (const auto& name : file.names()) tensors.emplace(name, file);
  return tensors;
}

std::map<std::string, at::Tensor> load_archives(const fs::path& index) {
  return tensors_of<at::Tensor>(index, formats::load_archive,
                                [](const std::map<std::string, at::Tensor>& file, const std::string& name) {
                                  const auto found = file.find(name);
                                  return found == file.end() ? nullptr : &found->second;
                                });
}

bool has_pickled_shards(const fs::path& index) {
  const auto files = formats::read_index(index);
  return std::any_of(files.begin(), files.end(),
                     [](const auto& entry) { return fs::path(entry.second).extension() != ".safetensors"; });
}

}  // namespace

std::optional<std::string> formats::tensor_name(const c10::IValue& key) {
  if (key.isString()) return key.toStringRef();
  return key.isInt() ? std::optional(std::to_string(key.toInt())) : std::nullopt;
}

std::map<std::string, at::Tensor> formats::load_archive(const fs::path& path) {
  const auto file = std::make_shared<formats::InputFile>(path);
  const auto value = TorchArchive(file, 0, file->size(), "load '" + path.string() + "'").value();
  const auto refuse = [&](const std::string& found) {
    raise<CheckpointError>("load '{}': found {}, expected tensors by their names. Save the model's state_dict().",
                           path.string(), found);
  };
  if (!value.isGenericDict()) refuse(value.tagKind());
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : value.toGenericDict()) {
    const auto name = tensor_name(item.key());
    if (!name) refuse(fmt::format("a dict whose keys are of the kind {}, not names", item.key().tagKind()));
    if (!item.value().isTensor()) refuse(item.value().tagKind() + " under '" + *name + "'");
    if (!tensors.emplace(*name, item.value().toTensor()).second)
      refuse(fmt::format("the key {0} as a number and as the text '{0}'", *name));
  }
  return tensors;
}

std::map<std::string, SafetensorsFile> open_checkpoint_files(const fs::path& path) {
  if (!is_folder(path)) return path.extension() == ".json" ? open_index(path) : open_file(path);
  if (is_there(path / kWeights)) return open_file(path / kWeights);
  if (is_there(path / kIndex)) return open_index(path / kIndex);
  const bool pickled = is_there(path / kPickledWeights) || is_there(path / kPickledIndex);
  raise<CheckpointError>(
      "folder '{}' holds neither {} nor {}.{}", path.string(), kWeights, kIndex,
      pickled ? " It holds pytorch_model.bin, which can't be mapped; load_checkpoint_files() reads it into memory."
              : " Is it the folder of a saved model?");
}

std::map<std::string, at::Tensor> load_checkpoint_files(const fs::path& path) {
  if (is_folder(path) && !is_there(path / kWeights) && !is_there(path / kIndex)) {
    if (is_there(path / kPickledWeights)) return formats::load_archive(path / kPickledWeights);
    if (is_there(path / kPickledIndex)) return load_archives(path / kPickledIndex);
  }
  if (path.extension() == ".json" && has_pickled_shards(path)) return load_archives(path);
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, file] : open_checkpoint_files(path)) tensors.emplace(name, file.tensor(name));
  return tensors;
}

}  // namespace accelerate
