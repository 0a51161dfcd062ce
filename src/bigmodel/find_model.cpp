#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/config.hpp"
#include "bigmodel/built_in_models.hpp"
#include "bigmodel/torch_file.hpp"
#include "formats/gguf_header.hpp"
#include "formats/index_file.hpp"
#include "formats/mapped_file.hpp"
#include "formats/safetensors_elements.hpp"
#include "formats/safetensors_header.hpp"
#include "utils/json.hpp"
#include "utils/read_file.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;

/// PyTorch's name; floating-point numbers become float32, which models are counted in.
std::string counted_as(const std::string& dtype) {
  const auto name = formats::find_element(dtype)->torch;  // the header's reader knows all
  return std::string(name.empty() || name.find("float") != std::string_view::npos ? "float32" : name);
}

/// By its first bytes, whatever its name: a zip, or a pickle of protocol 2.
bool is_torch_file(const fs::path& path) {
  char begin[4] = {};
  const formats::InputFile file(path);
  file.read(0, begin, std::min<int64_t>(file.size(), sizeof begin));
  return std::string_view(begin, 4) == "PK\3\4" || std::string_view(begin, 2) == "\x80\x02";
}

/// Of tensors in few bits, layer by layer.
class StoredCount {
 public:
  /// @param layer  what is in one place at a time
  void add(const std::string& layer, int64_t bytes) {
    layers_[layer] += static_cast<double>(bytes);
    total_ += static_cast<double>(bytes);
  }
  StoredSizes sizes(std::string encoding) const {
    StoredSizes sizes{.encoding = std::move(encoding), .largest_layer = 0, .total = total_};
    for (const auto& [layer, bytes] : layers_) sizes.largest_layer = std::max(sizes.largest_layer, bytes);
    return sizes;
  }

 private:
  std::map<std::string, double> layers_;
  double total_ = 0;
};

std::optional<StoredSizes> stored_in(const formats::GgufHeader& header) {
  StoredCount count;
  std::map<std::string, int64_t> bytes_of;
  for (const auto& tensor : header.tensors) {
    count.add(tensor.name.substr(0, tensor.name.rfind('.')), tensor.bytes);
    bytes_of[tensor.encoding->name] += tensor.bytes;
  }
  bool blocks = false;
  for (const auto& tensor : header.tensors) blocks = blocks || tensor.encoding->block > 1;
  if (!blocks) return std::nullopt;
  const auto most = std::ranges::max_element(bytes_of, {}, [](const auto& entry) { return entry.second; });
  return count.sizes(most->first);
}

void add_file(bigmodel::FileTree& tree, const fs::path& path, std::optional<StoredSizes>& stored) {
  if (path.extension() != ".safetensors" && is_torch_file(path)) return bigmodel::add_torch_file(tree, path);
  if (path.extension() == ".gguf") {
    const formats::MappedFile file(path);
    auto header = formats::parse_gguf_header({file.data(), static_cast<size_t>(file.size())}, path.string(),
                                             formats::GgufLists::short_ones);
    formats::check_gguf_data(header, file.size(), path.string());
    stored = stored_in(header);
    for (auto& tensor : header.tensors) tree.add(tensor.name, {.name = "", .shape = std::move(tensor.shape)});
    return;
  }
  auto header = formats::read_safetensors_header(formats::InputFile(path));
  std::sort(header.names.begin(), header.names.end());  // as layers are numbered, not as bytes lie
  for (const auto& name : header.names) {
    auto& info = header.tensors.at(name);
    tree.add(name, {.name = "", .shape = std::move(info.shape), .dtype = counted_as(info.dtype)});
  }
}

ModelDescription from_weights(const fs::path& path) {
  bigmodel::FileTree tree("'" + path.string() + "'");
  std::optional<StoredSizes> stored;
  const auto described = [&] {
    return ModelDescription{.source = path.string(), .tree = std::move(tree.root()), .stored = std::move(stored)};
  };
  if (path.extension() != ".json") {
    add_file(tree, path, stored);
    return described();
  }
  std::set<std::string> shards;
  for (const auto& [name, shard] : formats::read_index(path)) shards.insert(shard);
  for (const auto& shard : shards) {
    if (!is_there(path.parent_path() / shard))
      raise<CheckpointError>(
          "index '{}': there is no file '{}' beside it. Copy all files of the model into one folder.", path.string(),
          shard);
    add_file(tree, path.parent_path() / shard, stored);
  }
  return described();
}

std::optional<fs::path> weights_in(const fs::path& folder) {
  for (const char* name : {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                           "pytorch_model.bin.index.json", "index.json"})
    if (is_there(folder / name)) return folder / name;
  return std::nullopt;
}

/// What a quantization_config calls its encoding; nothing for a model without one.
std::optional<std::string> quantized_as(const std::string& config) {
  const auto json = parse_json<nlohmann::json>(config);
  if (!json.is_object() || !json.contains("quantization_config") || !json["quantization_config"].is_object())
    return std::nullopt;
  const auto& how = json["quantization_config"];
  const auto is = [&](const char* key) { return how.contains(key) && how[key] == true; };
  const auto text = [&](const char* key, const char* fallback) {
    return how.contains(key) && how[key].is_string() ? how[key].get<std::string>() : std::string(fallback);
  };
  if (is("load_in_8bit")) return "int8";
  return is("load_in_4bit") ? text("bnb_4bit_quant_type", "fp4") : text("quant_method", "codes");
}

/// Paths of the modules that are kept whole.
void collect_layers(const ModelDescription& model, const ModuleTree& module, const std::string& path,
                    std::set<std::string>& layers) {
  if (std::ranges::find(model.no_split_module_classes, module.class_name) != model.no_split_module_classes.end())
    return void(layers.insert(path));
  for (const auto& child : module.children)
    collect_layers(model, child, path.empty() ? child.name : path + "." + child.name, layers);
}

StoredSizes stored_in(const ModelDescription& model, const fs::path& weights, std::string encoding) {
  std::set<std::string> layers;
  collect_layers(model, model.tree, "", layers);
  std::set<fs::path> files{weights};
  if (weights.extension() == ".json") {
    files.clear();
    for (const auto& [name, shard] : formats::read_index(weights)) files.insert(weights.parent_path() / shard);
  }
  // "l.weight.absmax" belongs to "l", and "model.layers.0.mlp" to "layers.0", whose file has a head, too.
  const auto layer_of = [&](const std::string& name) {
    for (size_t begin = 0, parts = 0; parts < 2; ++parts) {
      for (size_t dot = name.find('.', begin); dot != std::string::npos; dot = name.find('.', dot + 1))
        if (layers.contains(name.substr(begin, dot - begin))) return name.substr(0, dot);
      begin = name.find('.') + 1;
    }
    const size_t weight = name.find(".weight");
    return name.substr(0, weight == std::string::npos ? name.rfind('.') : weight);
  };
  StoredCount count;
  for (const auto& file : files) {
    const auto header = formats::read_safetensors_header(formats::InputFile(file));
    for (const auto& [name, info] : header.tensors) count.add(layer_of(name), info.end - info.begin);
  }
  return count.sizes(std::move(encoding));
}

ModelDescription from_config(const fs::path& path) {
  const std::string text = read_text<CheckpointError>("", path, kMostSettingsBytes);
  auto model = describe_architecture(text);
  model.source = path.string();
  if (auto encoding = quantized_as(text))
    for (const char* name : {"model.safetensors", "model.safetensors.index.json"})
      if (!model.stored && is_there(path.parent_path() / name))
        model.stored = stored_in(model, path.parent_path() / name, std::move(*encoding));
  return model;
}

ModelDescription from_path(const fs::path& path) {
  if (!is_folder(path)) {
    if (path.extension() == ".safetensors" || path.extension() == ".gguf" || formats::is_index_name(path) ||
        is_torch_file(path))
      return from_weights(path);
    if (path.extension() == ".json") return from_config(path);
    raise<ConfigError>(
        "'{}': expected a folder, a config.json, a .safetensors or .gguf file, one that torch.save or TorchScript "
        "wrote, or an index.",
        path.string());
  }
  const auto weights = weights_in(path);
  if (is_there(path / "config.json")) {
    try {
      return from_config(path / "config.json");
    } catch (const ConfigError&) {
      if (!weights) throw;  // else an architecture that is not known, of which the weights say enough
    }
  }
  if (!weights)
    raise<CheckpointError>(
        "folder '{}': it has neither config.json nor model.safetensors nor pytorch_model.bin (nor an index of several "
        "files). Is it the folder of a saved model?",
        path.string());
  return from_weights(*weights);
}

/// Where Hugging Face's programs keep what they have downloaded.
fs::path hub_cache() {
  const auto variable = [](const char* name) {
    const char* text = std::getenv(name);
    return std::string(text ? text : "");
  };
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})
    if (const auto folder = variable(name); !folder.empty()) return folder;
  if (const auto home = variable("HF_HOME"); !home.empty()) return fs::path(home) / "hub";
  const auto caches = variable("XDG_CACHE_HOME");
  return (caches.empty() ? fs::path(variable("HOME")) / ".cache" : fs::path(caches)) / "huggingface" / "hub";
}

/// The folder with the files of a model's newest revision there, as refs/main names it; nothing if there is none.
std::optional<fs::path> in_hub_cache(const std::string& name) {
  std::string folder = "models--";
  for (const char c : name) folder += c == '/' ? "--" : std::string(1, c);
  const fs::path model = hub_cache() / folder;
  std::string revision;
  if (!read_file(model / "refs" / "main", kMostSettingsBytes, revision).empty()) return std::nullopt;
  revision = revision.substr(0, revision.find_first_of("\r\n"));
  if (revision.empty() || fs::path(revision).filename() != revision) return std::nullopt;
  const fs::path files = model / "snapshots" / revision;
  return is_folder(files) ? std::optional(files) : std::nullopt;
}

/// Words in lines of at most a terminal's width.
std::string wrapped(const std::vector<std::string>& words) {
  constexpr size_t kColumns = 100;
  std::string lines = "\n ";
  size_t column = 1;
  for (const auto& word : words) {
    if (column + 1 + word.size() > kColumns) lines += "\n ", column = 1;
    lines += " " + word;
    column += 1 + word.size();
  }
  return lines;
}

ModelDescription from_name(const std::string& name) {
  if (const auto* built_in = bigmodel::find_built_in(name)) {
    auto model = describe_architecture(std::string(built_in->config));
    model.source = "built in";
    return model;
  }
  if (const auto folder = in_hub_cache(name)) return from_path(*folder);
  const auto nearest = nearest_name(name, bigmodel::built_in_names());
  raise<ConfigError>(
      "'{}' is neither a file or folder, nor the name of a built-in model, nor one of the Hugging Face cache {}.{} "
      "Nothing is downloaded: get its config.json (a few KB) and give that. Built-in:{}",
      name, hub_cache().string(), nearest ? fmt::format(" Did you mean '{}'?", *nearest) : "",
      wrapped(bigmodel::built_in_names()));
}

}  // namespace

ModelDescription find_model(const std::string& name, const std::string& library) {
  auto model = is_there(name) ? from_path(name) : from_name(name);
  model.name = name;
  if (!library.empty() && !model.library.empty() && model.library != library)
    raise<ConfigError>("'{}' is a model of {}, not of {}. Leave out --library_name, or give the other.", name,
                       model.library, library);
  return model;
}

}  // namespace accelerate
