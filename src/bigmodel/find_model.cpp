#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/config.hpp"
#include "bigmodel/built_in_models.hpp"
#include "bigmodel/hub_cache.hpp"
#include "bigmodel/torch_file.hpp"
#include "formats/gguf_header.hpp"
#include "formats/index_file.hpp"
#include "formats/mapped_file.hpp"
#include "formats/safetensors_elements.hpp"
#include "formats/safetensors_header.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"

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

/// Counts the bytes of tensors in few bits, layer by layer.
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

/// Weights of bitsandbytes among tensors, by the names of what lies beside them.
class CodeNames {
 public:
  void look(const std::string& name) {
    if (name == "SCB" || name.ends_with(".SCB")) weights_.emplace("int8", name);
    // By the last character of kState, as there may be 200,000 names.
    const size_t begin = name.rfind('_') + 1;
    if (begin < kState.size() || name.compare(begin - kState.size(), kState.size(), kState) != 0) return;
    weights_.emplace(name.substr(begin), name.substr(0, begin - kState.size()));
  }
  bool empty() const { return weights_.empty(); }
  /// "nf4", or "fp4 and int8"
  std::string encodings() const {
    std::string all;
    for (const auto& [encoding, weight] : weights_) {
      if (encoding != "int8" && encoding != "nf4" && encoding != "fp4")
        raise<CheckpointError>(
            "the weight '{}' in bitsandbytes' form: its type is '{}', expected nf4 or fp4; the file may be damaged, or "
            "of another library",
            weight, encoding);
      all += (all.empty() ? "" : " and ") + encoding;
    }
    return all;
  }

 private:
  static constexpr std::string_view kState = ".quant_state.bitsandbytes__";
  std::map<std::string, std::string> weights_;  ///< one of each encoding
};

void add_file(bigmodel::FileTree& tree, const fs::path& path, std::optional<StoredSizes>& stored, CodeNames& codes) {
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
    codes.look(name);
    tree.add(name, {.name = "", .shape = std::move(info.shape), .dtype = counted_as(info.dtype)});
  }
}

/// Paths of the modules that are kept whole.
void collect_layers(const ModelDescription& model, const ModuleTree& module, const std::string& path,
                    std::set<std::string>& layers) {
  if (std::ranges::find(model.no_split_module_classes, module.class_name) != model.no_split_module_classes.end())
    return void(layers.insert(path));
  for (const auto& child : module.children)
    collect_layers(model, child, path.empty() ? child.name : path + "." + child.name, layers);
}

/// @param weights  a .safetensors file or an index of some
StoredSizes stored_in(const ModelDescription& model, const fs::path& weights, const CodeNames& codes) {
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
  return count.sizes(codes.encodings());
}

ModelDescription from_weights(const fs::path& path) {
  bigmodel::FileTree tree("'" + path.string() + "'");
  std::optional<StoredSizes> stored;
  CodeNames codes;
  const auto described = [&] {
    ModelDescription model{.source = path.string(), .tree = std::move(tree.root()), .stored = std::move(stored)};
    if (!codes.empty()) model.stored = stored_in(model, path, codes);
    return model;
  };
  if (path.extension() != ".json") {
    add_file(tree, path, stored, codes);
    return described();
  }
  std::set<std::string> shards;
  for (const auto& [name, shard] : formats::read_index(path)) shards.insert(shard);
  for (const auto& shard : shards) {
    if (!is_there(path.parent_path() / shard))
      raise<CheckpointError>(
          "index '{}': there is no file '{}' beside it. Copy all files of the model into one folder.", path.string(),
          shard);
    add_file(tree, path.parent_path() / shard, stored, codes);
  }
  return described();
}

std::optional<fs::path> weights_in(const fs::path& folder) {
  for (const char* name : {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                           "pytorch_model.bin.index.json", "index.json"})
    if (is_there(folder / name)) return folder / name;
  return std::nullopt;
}

/// Refuses a quantization_config as BnbQuantizationConfig::from_json() does, which needs LibTorch. @return whether
/// there is one
bool check_quantization(const std::string& config) {
  const auto json = parse_json<nlohmann::json>(config);
  if (!json.is_object() || !json.contains("quantization_config") || json["quantization_config"].is_null()) return false;
  const auto& how = json["quantization_config"];
  const auto find = [&](const char* key) {
    const auto found = how.find(key);
    return found == how.end() || found->is_null() ? nullptr : &*found;
  };
  if (!how.is_object() || !(how.contains("load_in_4bit") || how.contains("load_in_8bit") || find("quant_method")))
    raise<ConfigError>(
        "quantization_config: found {}, expected what bitsandbytes or `accelerate quantize` writes into config.json",
        show_json(how));
  if (const auto* method = find("quant_method"); method && *method == "unfinished_save")
    raise<ConfigError>(
        "quantization_config: quant_method is \"unfinished_save\": save_quantized_model() was interrupted while it "
        "replaced the weights, expected a finished save. Save the model again");
  else if (method && *method != "bitsandbytes")
    raise<ConfigError>(
        "quantization_config: quant_method is {}, expected \"bitsandbytes\": weights of other methods can't be read. "
        "Take the model's folder before it was quantized, or one for bitsandbytes, or a GGUF file of it",
        show_json(*method));
  const auto flag = [&](const char* key) {
    const auto* value = find(key);
    if (value && !value->is_boolean())
      raise<ConfigError>("quantization_config: {} is {}, expected true or false", key, show_json(*value));
    return value && value->get<bool>();
  };
  if (const bool eight = flag("load_in_8bit"); eight == flag("load_in_4bit"))
    raise<ConfigError>("quantization_config: found load_in_8bit = {0} and load_in_4bit = {0}, expected one of them",
                       eight);
  if (const auto* type = find("bnb_4bit_quant_type"); type && *type != "nf4" && *type != "fp4")
    raise<ConfigError>("quantization_config: found bnb_4bit_quant_type = {}, expected \"fp4\" or \"nf4\"",
                       show_json(*type));
  return true;
}

/// The names in a .safetensors file or an index of some.
CodeNames codes_in(const fs::path& weights) {
  CodeNames codes;
  if (weights.extension() == ".json")
    for (const auto& [name, shard] : formats::read_index(weights)) codes.look(name);
  else
    for (const auto& name : formats::read_safetensors_header(formats::InputFile(weights)).names) codes.look(name);
  return codes;
}

std::optional<fs::path> safetensors_in(const fs::path& folder) {
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"})
    if (is_there(folder / name)) return folder / name;
  return std::nullopt;
}

/// @return nothing for an architecture that is not known, if `has_weights`, which say enough
std::optional<ModelDescription> from_config(const fs::path& path, bool has_weights) {
  const std::string text = read_text<CheckpointError>("", path, kMostSettingsBytes);
  const bool quantized = weights_in(path.parent_path()) && check_quantization(text);
  ModelDescription model;
  try {
    model = describe_architecture(text);
  } catch (const ConfigError& error) {
    if (has_weights) return std::nullopt;
    raise<ConfigError>(
        "{} For another one give the file or folder with its weights: then sizes are read from their header.",
        error.what());
  }
  model.source = path.string();
  if (const auto weights = safetensors_in(path.parent_path())) {
    CodeNames codes;
    try {
      codes = codes_in(*weights);
    } catch (const Error&) {
      if (quantized) throw;  // else files that are not whole yet, which the architecture's sizes don't need
    }
    if (!codes.empty()) model.stored = stored_in(model, *weights, codes);
  }
  return model;
}

ModelDescription from_path(const fs::path& path) {
  if (!is_folder(path)) {
    if (path.extension() == ".safetensors" || path.extension() == ".gguf" || formats::is_index_name(path) ||
        is_torch_file(path))
      return from_weights(path);
    if (path.extension() == ".json") return *from_config(path, /*has_weights=*/false);
    raise<ConfigError>(
        "'{}': expected a folder, a config.json, a .safetensors or .gguf file, one that torch.save or TorchScript "
        "wrote, or an index.",
        path.string());
  }
  const auto weights = weights_in(path);
  if (is_there(path / "config.json"))
    if (auto model = from_config(path / "config.json", weights.has_value())) return std::move(*model);
  if (!weights)
    raise<CheckpointError>(
        "folder '{}': it has neither config.json nor model.safetensors nor pytorch_model.bin (nor an index of several "
        "files). Is it the folder of a saved model?",
        path.string());
  return from_weights(*weights);
}

}  // namespace

fs::path bigmodel::hub_cache() {
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

std::optional<fs::path> bigmodel::in_hub_cache(const std::string& name) {
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

fs::path bigmodel::local_model(const fs::path& model) {
  if (is_there(model)) return model;
  const auto cached = model.is_absolute() ? std::nullopt : in_hub_cache(model.string());
  if (!cached)
    raise<CheckpointError>(
        "'{}' does not exist, and is no name in the Hugging Face cache {}; expected a folder with a model, a .gguf "
        "file, or such a name. Nothing is downloaded: fetch the model first.",
        model.string(), hub_cache().string());
  return *cached;
}

namespace {

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
  if (const auto folder = bigmodel::in_hub_cache(name)) return from_path(*folder);
  const auto nearest = nearest_name(name, bigmodel::built_in_names());
  raise<ConfigError>(
      "'{}' is neither a file or folder, nor the name of a built-in model, nor one of the Hugging Face cache {}.{} "
      "Nothing is downloaded: get its config.json (a few KB) and give that. Built-in:{}",
      name, bigmodel::hub_cache().string(), nearest ? fmt::format(" Did you mean '{}'?", *nearest) : "",
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
