#include "accelerate/bigmodel/offload.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "accelerate/config.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "bigmodel/offload_places.hpp"
#include "formats/mapped_file.hpp"
#include "formats/safetensors_dtypes.hpp"
#include "formats/torch_dtypes.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"
#include "utils/atomic_file.hpp"
#include "utils/parallel.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr const char* kIndexName = "index.json";

fs::path index_of(const fs::path& folder) { return folder / kIndexName; }

/// The file of a weight. Its name comes from others' indexes too, so it must not lead anywhere else.
fs::path file_of(const fs::path& folder, const std::string& name) {
  if (name.empty() || name.find('/') != std::string::npos || name.find('\0') != std::string::npos)
    raise<CheckpointError>(
        "offload folder '{}': '{}' can't be the name of a weight, because its file would not be in the folder. Names "
        "of weights have no '/'.",
        folder.string(), name);
  return folder / (name + ".dat");
}

/// The same, to be read.
fs::path stored_file(const fs::path& folder, const std::string& name) {
  const std::string what = "offloaded weight '" + name + "'";
  const auto file = file_inside(what, folder, file_of(folder, name).filename());
  check_inside(what, folder, file);
  return file;
}

/// bool and numbers that NumPy has, bfloat16 and the 8-bit floats: what the reference can write.
bool has_name_in_index(at::ScalarType type) {
  return formats::find_torch_dtype(type) && type != at::kComplexHalf && type != at::kFloat4_e2m1fn_x2;
}

std::string name_of(at::ScalarType type) {
  constexpr std::string_view kPrefix = "torch.";
  return std::string(formats::find_torch_dtype(type)->name.substr(kPrefix.size()));
}

at::ScalarType type_of(const std::string& name, const std::string& where) {
  const auto* dtype = formats::find_torch_dtype("torch." + name);
  if (!dtype || !has_name_in_index(dtype->type))
    raise<CheckpointError>("{}: the dtype '{}' is not one that offload folders have, like float32, bfloat16 or int64.",
                           where, name);
  return dtype->type;
}

ordered_json json_of(const OffloadedWeight& weight) {
  ordered_json entry = ordered_json::object();
  if (!weight.safetensors_file.empty()) {
    entry["safetensors_file"] = weight.safetensors_file.string();
    if (!weight.weight_name.empty()) entry["weight_name"] = weight.weight_name;
    if (!weight.dtype.empty()) entry["dtype"] = weight.dtype;
  } else {
    entry["dtype"] = weight.dtype;
    entry["shape"] = weight.shape;
  }
  return entry;
}

ordered_json parse_index(const fs::path& file) {
  std::string problem;
  auto root = parse_json<ordered_json>(read_text<CheckpointError>("offload index", file, kMostListBytes,
                                                                  "Is its folder one that offload_state_dict wrote?"),
                                       &problem);
  if (!root.is_object())
    raise<CheckpointError>(
        "offload index '{}': it is not a JSON object{}. It is probably truncated: offload the weights again.",
        file.string(), problem.empty() ? "" : ": it " + problem);
  return root;
}

OffloadedWeight weight_of(const std::string& name, const ordered_json& entry, const fs::path& file) {
  const auto fail = [&](const std::string& what) {
    raise<CheckpointError>("offload index '{}': '{}' is {}, {}", file.string(), name, show_json(entry, 200), what);
  };
  const auto text = [&](const char* key) -> std::string {
    if (!entry.contains(key) || entry[key].is_null()) return "";
    if (!entry[key].is_string()) fail(fmt::format("expected a text under \"{}\".", key));
    return entry[key].get<std::string>();
  };
  if (!entry.is_object()) fail("expected an object.");
  OffloadedWeight weight{
      .dtype = text("dtype"), .safetensors_file = text("safetensors_file"), .weight_name = text("weight_name")};
  if (!weight.safetensors_file.empty()) return weight;
  if (weight.dtype.empty() || !entry.contains("shape") || !entry["shape"].is_array())
    fail("expected \"dtype\" and \"shape\", or \"safetensors_file\".");
  constexpr size_t kMostDimensions = 64;  // PyTorch's limit
  if (entry["shape"].size() > kMostDimensions) fail(fmt::format("expected at most {} dimensions.", kMostDimensions));
  for (const auto& size : entry["shape"]) {
    weight.shape.push_back(whole_number(size).value_or(-1));
    if (weight.shape.back() < 0) fail("expected sizes of 0 or more in its shape.");
  }
  return weight;
}

void write_weight(const at::Tensor& weight, const std::string& name, const fs::path& folder) {
  const auto file = file_of(folder, name);
  if (!weight.defined() || weight.is_meta())
    raise<CheckpointError>(
        "offload_weight: '{}' has no data (it is on the meta device). Give it values first, with materialize() or from "
        "a checkpoint.",
        name);
  if (!has_name_in_index(weight.scalar_type()) || weight.layout() != at::kStrided)
    raise<CheckpointError>(
        "offload_weight: '{}' is {}, which an offload folder can't hold. Convert it first.", name,
        weight.layout() == at::kStrided ? fmt::format("of dtype {}", c10::toString(weight.scalar_type())) : "sparse");
  const auto values = weight.detach().to(at::kCPU).contiguous();
  AtomicFile out("offload_weight", file);
  // NumPy can't map an empty file, so the reference leaves one byte for a tensor without elements.
  out.write(values.numel() == 0 ? std::string_view("\0", 1)
                                : std::string_view(static_cast<const char*>(values.const_data_ptr()), values.nbytes()));
  out.finish(/*flush=*/false);  // room to work in, which is made again after a power cut
}

}  // namespace

void offload_weight(const at::Tensor& weight, const std::string& name, const fs::path& folder, OffloadIndex* index) {
  write_weight(weight, name, folder);
  if (!index) return;
  std::erase_if(*index, [&](const auto& entry) { return entry.first == name; });
  index->emplace_back(name, bigmodel::offloaded_weight_of(weight));
}

at::Tensor load_offloaded_weight(const fs::path& file, const OffloadedWeight& weight) {
  const auto type = type_of(weight.dtype, "offloaded weight '" + file.string() + "'");
  const auto map = std::make_shared<formats::MappedFile>(file);
  auto bytes = static_cast<int64_t>(c10::elementSize(type));
  bool empty = false;
  for (const int64_t size : weight.shape)
    // Strides are products of the other sizes even where one size is 0, so these must not overflow either.
    if (empty = empty || size == 0; __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes))
      raise<CheckpointError>(
          "offloaded weight '{}': its shape {} has more bytes than there are numbers. The index is damaged.",
          file.string(), weight.shape);
  if (empty) bytes = 0;
  if (map->size() < bytes)
    raise<CheckpointError>(
        "offloaded weight '{}': the file has {} bytes, its shape and dtype {} need {}. It is truncated or of another "
        "model: offload the weights again.",
        file.string(), map->size(), weight.dtype, bytes);
  if (bytes == 0) return at::empty(weight.shape, at::TensorOptions().dtype(type));
  return at::from_blob(
      map->data(), weight.shape, [map](void*) {}, at::TensorOptions().dtype(type));
}

void save_offload_index(const OffloadIndex& index, const fs::path& folder) {
  if (index.empty()) return;
  const auto file = index_of(folder);
  auto root = is_there(file) ? parse_index(file) : ordered_json::object();
  for (const auto& [name, weight] : index) root[name] = json_of(weight);
  AtomicFile out("save_offload_index", file);
  out.write(root.dump(2, ' ', /*ensure_ascii=*/true));
  out.finish();
}

OffloadIndex load_offload_index(const fs::path& folder) {
  const auto file = index_of(folder);
  OffloadIndex index;
  const auto root = parse_index(file);
  for (const auto& [name, entry] : root.items()) {
    index.emplace_back(name, weight_of(name, entry, file));
    if (const auto& other = index.back().second.safetensors_file; !other.empty())
      check_inside(fmt::format("offload index '{}': '{}'", file.string(), name), folder, other);
  }
  return index;
}

void offload_state_dict(const fs::path& folder, const NamedTensors& state_dict) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    raise<CheckpointError>("offload_state_dict: can't create the folder '{}': {}.", folder.string(), error.message());
  // Filling the system's cache is work of the processors: all take part.
  parallel_ranges(static_cast<int64_t>(state_dict.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto item = state_dict.begin() + begin; item != state_dict.begin() + end; ++item)
      write_weight(item->second, item->first, folder);
  });
  OffloadIndex index;
  for (const auto& [name, tensor] : state_dict) index.emplace_back(name, bigmodel::offloaded_weight_of(tensor));
  save_offload_index(index, folder);
}

namespace bigmodel {

residency::TensorInFile tensor_in_folder(const fs::path& folder, const std::string& name,
                                         const OffloadedWeight& weight) {
  const std::string where = "offloaded weight '" + name + "'";
  if (!weight.safetensors_file.empty()) {
    const SafetensorsFile file(weight.safetensors_file);
    const std::string inside = weight.weight_name.empty() ? name : weight.weight_name;
    const auto& info = file.info(inside);
    const auto* dtype = formats::find_dtype(info.dtype);
    if (!dtype->torch || dtype->packed > 1)
      raise<CheckpointError>(
          "{}: '{}' has it as {}, which has no LibTorch type with an element per number. Convert the file.", where,
          weight.safetensors_file.string(), info.dtype);
    return {.file = weight.safetensors_file,
            .begin = file.data_begin() + info.begin,
            .bytes = info.end - info.begin,
            .dtype = *dtype->torch,
            .shape = info.shape,
            .map = [file, inside] { return file.tensor(inside); },
            .decode = nullptr};
  }
  if (folder.empty())
    raise<ConfigError>("{} is in a file of its own, and no folder was given to look for it. Give offload_dir.", where);
  residency::TensorInFile result{.file = stored_file(folder, name),
                                 .begin = 0,
                                 .bytes = 0,
                                 .dtype = type_of(weight.dtype, where),
                                 .shape = weight.shape,
                                 .map = nullptr,
                                 .decode = nullptr};
  // Also checks that the file is there, and long enough.
  result.bytes = static_cast<int64_t>(load_offloaded_weight(result.file, weight).nbytes());
  result.map = [file = result.file, weight] { return load_offloaded_weight(file, weight); };
  return result;
}

OffloadedWeight offloaded_weight_of(const at::Tensor& tensor) {
  return {
      .dtype = name_of(tensor.scalar_type()), .shape = tensor.sizes().vec(), .safetensors_file = {}, .weight_name = {}};
}

}  // namespace bigmodel

struct OffloadedWeightsLoader::Content {
  std::map<std::string, at::Tensor> in_memory;
  fs::path folder;
  std::map<std::string, OffloadedWeight> index;
  std::vector<std::string> names;
  mutable std::mutex mutex;  ///< guards what follows
  mutable std::map<fs::path, SafetensorsFile> open;

  SafetensorsFile opened(const fs::path& path) const {
    const std::lock_guard lock(mutex);
    const auto found = open.find(path);
    return found != open.end() ? found->second : open.emplace(path, SafetensorsFile(path)).first->second;
  }
};

OffloadedWeightsLoader::OffloadedWeightsLoader(OffloadedWeightsLoaderOptions options) {
  if (options.state_dict.empty() && options.save_folder.empty() && !options.index)
    throw ConfigError(
        "OffloadedWeightsLoader: there is nothing to load from. Give a state_dict, the save_folder of an earlier "
        "offload_state_dict, or an index.");
  auto content = std::make_shared<Content>();
  for (const auto& [name, tensor] : options.state_dict) content->names.push_back(name);
  if (!options.index && !options.save_folder.empty()) options.index = load_offload_index(options.save_folder);
  if (options.index)
    for (auto& [name, weight] : *options.index) {
      if (!options.state_dict.contains(name) && !content->index.contains(name)) content->names.push_back(name);
      content->index.insert_or_assign(name, std::move(weight));
    }
  content->in_memory = std::move(options.state_dict);
  content->folder = std::move(options.save_folder);
  content_ = std::move(content);
}

at::Tensor OffloadedWeightsLoader::operator[](const std::string& name) const {
  if (const auto found = content_->in_memory.find(name); found != content_->in_memory.end()) return found->second;
  const auto found = content_->index.find(name);
  if (found == content_->index.end()) {
    const auto nearest = nearest_name(name, names());
    raise<CheckpointError>("there is no offloaded weight '{}' among {}.{}", name, size(),
                           nearest ? fmt::format(" Did you mean '{}'?", *nearest) : "");
  }
  const auto& weight = found->second;
  if (weight.safetensors_file.empty()) {
    if (content_->folder.empty())
      raise<ConfigError>(
          "OffloadedWeightsLoader: '{}' is in a file of its own, and no save_folder was given to look for it.", name);
    return load_offloaded_weight(stored_file(content_->folder, name), weight);
  }
  const auto tensor =
      content_->opened(weight.safetensors_file).tensor(weight.weight_name.empty() ? name : weight.weight_name);
  return weight.dtype.empty() ? tensor : tensor.to(type_of(weight.dtype, "offloaded weight '" + name + "'"));
}

bool OffloadedWeightsLoader::contains(const std::string& name) const {
  return content_->in_memory.contains(name) || content_->index.contains(name);
}
const std::vector<std::string>& OffloadedWeightsLoader::names() const { return content_->names; }

}  // namespace accelerate
