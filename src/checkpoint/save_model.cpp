#include <nlohmann/json.hpp>

#include <charconv>
#include <optional>
#include <regex>
#include <set>
#include <utility>

#include "accelerate/checkpoint.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "checkpoint/model_state.hpp"
#include "checkpoint/weight_files.hpp"
#include "formats/torch_archive.hpp"
#include "input/read_file.hpp"
#include "residency/home.hpp"
#include "residency/member.hpp"
#include "residency/unit.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::checkpointing {

std::string shard_name(const std::string& stem, const std::string& extension, size_t index, size_t count) {
  return count == 1 ? stem + extension : fmt::format("{}-{:05}-of-{:05}{}", stem, index + 1, count, extension);
}

std::string weight_index(const std::map<std::string, std::string>& files, int64_t total) {
  nlohmann::ordered_json weight_map = nlohmann::ordered_json::object();
  for (const auto& [tensor, file] : files) weight_map[tensor] = file;
  return nlohmann::ordered_json{{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}}.dump(2) + "\n";
}

void write_tensors(const std::string& operation, const std::filesystem::path& file,
                   std::vector<formats::TensorSource> tensors, bool safe_serialization) {
  if (safe_serialization) return formats::write_safetensors(file, std::move(tensors), {{"format", "pt"}});
  formats::TorchPickle pickle;
  pickle.empty_dict(), pickle.mark();
  for (auto& tensor : tensors)
    pickle.text(tensor.name), pickle.tensor(tensor.dtype, tensor.sizes, false, std::move(tensor.read));
  pickle.set_items_to_mark();
  AtomicFile out(operation, file);
  formats::write_torch_archive(std::move(pickle), [&](std::string_view bytes) { out.write(bytes); });
  out.finish();
}

int64_t parse_size(const std::string& text) {
  static const std::pair<const char*, int64_t> kUnits[] = {{"KiB", int64_t{1} << 10},
                                                           {"MiB", int64_t{1} << 20},
                                                           {"GiB", int64_t{1} << 30},
                                                           {"TiB", int64_t{1} << 40},
                                                           {"KB", 1000},
                                                           {"MB", 1000000},
                                                           {"GB", 1000000000},
                                                           {"TB", 1000000000000}};
  for (const auto& [unit, factor] : kUnits) {
    if (!text.ends_with(unit)) continue;
    double number = 0;
    const char* last = text.data() + text.size() - std::string(unit).size();
    while (last > text.data() && last[-1] == ' ') --last;
    const auto [end, error] = std::from_chars(text.data(), last, number);
    if (error != std::errc() || end != last || !(number > 0) || number * static_cast<double>(factor) > 9e18) break;
    return static_cast<int64_t>(number * static_cast<double>(factor));
  }
  raise<ConfigError>(
      "size: found '{}', expected a positive number and a unit: KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB "
      "(powers of 1024), e.g. 10GB",
      text);
}

std::vector<std::vector<std::string>> split_weights(const std::vector<WeightSize>& weights, int64_t max_shard_bytes) {
  std::vector<std::vector<std::string>> shards;
  std::vector<std::string> current;
  int64_t bytes = 0;
  for (const auto& weight : weights) {
    if (weight.bytes > max_shard_bytes) {
      shards.push_back({weight.name});
      continue;
    }
    if (weight.bytes > max_shard_bytes - bytes) {
      shards.push_back(std::exchange(current, {}));
      bytes = 0;
    }
    current.push_back(weight.name);
    bytes += weight.bytes;
  }
  if (!current.empty() || shards.empty()) shards.push_back(std::move(current));
  return shards;
}

void write_weight_files(const std::filesystem::path& folder, const std::vector<WeightSize>& weights,
                        int64_t max_shard_bytes, bool safe_serialization, const WriteWeights& write) {
  const std::string stem = safe_serialization ? "model" : "pytorch_model",
                    extension = safe_serialization ? ".safetensors" : ".bin";
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  if (!std::filesystem::is_directory(folder))
    raise<CheckpointError>("save_model: '{}' can't be created as a folder ({}); a file of this name may be in the way",
                           folder.string(), failure.message());
  const auto shards = split_weights(weights, max_shard_bytes);
  std::map<std::string, std::string> sorted;
  std::set<std::string> written;
  int64_t total = 0;
  std::map<std::string, const std::vector<std::string>*> parts;
  for (const auto& weight : weights) {
    total += weight.bytes;
    if (!weight.parts.empty()) parts.emplace(weight.name, &weight.parts);
  }
  std::optional<AtomicFiles> files;  // one alone appears when it is finished
  if (shards.size() > 1) files.emplace("save_model", folder);
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto name = shard_name(stem, extension, i, shards.size());
    for (const auto& weight : shards[i]) {
      if (const auto found = parts.find(weight); found == parts.end()) sorted[weight] = name;
      else
        for (const auto& part : *found->second) sorted[part] = name;
    }
    write(files ? files->place(name) : folder / name, shards[i]);
    written.insert(name);
  }
  if (files) {
    const auto name = stem + extension + ".index.json";
    AtomicFile out("save_model", files->place(name));
    out.write(weight_index(sorted, total));
    out.finish();
    files->finish();
    written.insert(name);
  }
  // Shards of an earlier save would be taken for part of this one.
  const std::regex ours("(model|pytorch_model)(-\\d{5}-of-\\d{5})?\\.(safetensors|bin)(\\.index\\.json)?");
  for (const auto& entry : read_folder<CheckpointError>("saving to", folder)) {
    const auto name = entry.path().filename().string();
    if (entry.is_regular_file() && std::regex_match(name, ours) && !written.contains(name))
      std::filesystem::remove(entry.path());
  }
}

namespace {

/// Of weights that come and go, a copy for as long as their file is written; but where all ranks would have to fetch
/// them, the writer says what to do.
at::Tensor value_to_write(const at::Tensor& tensor) {
  const auto* const member = residency::Member::of(tensor);
  const bool comes_here = member && !member->unit().fixed() && !member->home().collective();
  return comes_here ? tensor.detach().clone().cpu() : value_of(tensor);
}

/// Values are asked for when their file is written: those of weights in few bits are decoded for that. Names of
/// `model` that `tensors` lack are tied to others.
void write_tensors(const ModelRef& model, const std::map<std::string, at::Tensor>& tensors,
                   const std::filesystem::path& folder, int64_t max_shard_bytes, bool safe_serialization) {
  std::vector<WeightSize> weights;
  for (const auto& [name, ignored] : model.state())
    if (const auto found = tensors.find(name); found != tensors.end())
      weights.push_back({name, static_cast<int64_t>(found->second.nbytes())});
  write_weight_files(folder, weights, max_shard_bytes, safe_serialization,
                     [&](const std::filesystem::path& file, const std::vector<std::string>& names) {
                       std::map<std::string, at::Tensor> part;
                       for (const auto& name : names) part.emplace(name, value_to_write(tensors.at(name)));
                       if (safe_serialization) save_safetensors(file, part, {{"format", "pt"}});
                       else save_object(to_dict(part), file);
                     });
}

}  // namespace

void save_model(const ModelRef& model, const std::filesystem::path& folder, int64_t max_shard_bytes,
                bool safe_serialization) {
  const auto tensors = state_dict(model, [](const at::Tensor& tensor) { return tensor; });
  write_tensors(model, tensors, folder, max_shard_bytes, safe_serialization);
}

void save_model(const ModelRef& model, const std::map<std::string, at::Tensor>& weights, const Sizes* sizes,
                const std::filesystem::path& folder, int64_t max_shard_bytes, bool safe_serialization) {
  check_weights(model, weights, sizes);
  write_tensors(model, each_memory_once(weights), folder, max_shard_bytes, safe_serialization);
}

}  // namespace accelerate::checkpointing
