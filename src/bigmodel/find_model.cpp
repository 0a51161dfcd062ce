#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/config.hpp"
#include "bigmodel/built_in_models.hpp"
#include "bigmodel/torch_file.hpp"
#include "formats/gguf_header.hpp"
#include "formats/index_file.hpp"
#include "formats/mapped_file.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || fs::is_directory(path))
    raise<CheckpointError>("can't open '{}': {}.", path.string(), std::strerror(errno));
  return {std::istreambuf_iterator<char>(file), {}};
}

/// What the header of a safetensors file says about its tensors. Names and numbers are all that is wanted here; the
/// reader in the library checks every rule of the format.
json read_header(const fs::path& path) {
  const auto fail = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
    raise<CheckpointError>("safetensors file '{}': {}", path.string(), fmt::format(what, std::forward<Args>(args)...));
  };
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("can't open it: {}.", std::strerror(errno));
  std::error_code error;
  const auto size = fs::file_size(path, error);
  unsigned char length_bytes[8];
  if (error || !file.read(reinterpret_cast<char*>(length_bytes), sizeof length_bytes))
    fail("it has no room for the length of a header. It is truncated or no safetensors file.");
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | length_bytes[i];
  constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's limit
  if (length > kMaxHeaderBytes || length + sizeof length_bytes > size)
    fail("its header has {} bytes, the file {}. It is truncated or no safetensors file.", length, size);
  std::string text(length, '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(length))) fail("its header can't be read.");
  auto header = json::parse(text, nullptr, false);
  if (!header.is_object()) fail("its header is not a JSON object. It is damaged.");
  return header;
}

/// PyTorch's name; floating-point numbers become float32, which models are counted in.
std::string counted_as(const std::string& dtype, const fs::path& path) {
  static const std::map<std::string, std::string> kIntegers = {{"BOOL", "bool"},  {"U8", "uint8"},   {"I8", "int8"},
                                                               {"I16", "int16"},  {"U16", "uint16"}, {"I32", "int32"},
                                                               {"U32", "uint32"}, {"I64", "int64"},  {"U64", "uint64"}};
  if (const auto found = kIntegers.find(dtype); found != kIntegers.end()) return found->second;
  if (dtype.starts_with("F") || dtype == "BF16") return "float32";
  if (dtype == "C64") return "complex64";
  raise<CheckpointError>("safetensors file '{}': there is no dtype '{}'. It is damaged or of a newer format.",
                         path.string(), dtype);
}

/// By its first bytes, whatever its name: a zip, or a pickle of protocol 2.
bool is_torch_file(const fs::path& path) {
  char begin[4] = {};
  std::ifstream(path, std::ios::binary).read(begin, sizeof begin);
  return std::string_view(begin, 4) == "PK\3\4" || std::string_view(begin, 2) == "\x80\x02";
}

void add_file(bigmodel::FileTree& tree, const fs::path& path) {
  if (path.extension() != ".safetensors" && is_torch_file(path)) return bigmodel::add_torch_file(tree, path);
  if (path.extension() == ".gguf") {
    const formats::MappedFile file(path);
    for (auto& tensor :
         formats::parse_gguf_header({file.data(), static_cast<size_t>(file.size())}, path.string()).tensors)
      tree.add(tensor.name, {.name = "", .shape = std::move(tensor.shape)});
    return;
  }
  const auto header = read_header(path);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const bool valid = entry.is_object() && entry.contains("dtype") && entry["dtype"].is_string() &&
                       entry.contains("shape") && entry["shape"].is_array() &&
                       std::all_of(entry["shape"].begin(), entry["shape"].end(), [](const json& size) {
                         return size.is_number_unsigned() && size.get<int64_t>() >= 0;
                       });
    if (!valid)
      raise<CheckpointError>("safetensors file '{}': '{}' has no dtype and shape. Its header is damaged.",
                             path.string(), name);
    tree.add(
        name,
        {.name = "", .shape = entry["shape"].get<std::vector<int64_t>>(), .dtype = counted_as(entry["dtype"], path)});
  }
}

ModelDescription from_weights(const fs::path& path) {
  bigmodel::FileTree tree("'" + path.string() + "'");
  const auto described = [&] { return ModelDescription{.source = path.string(), .tree = std::move(tree.root())}; };
  if (path.extension() != ".json") {
    add_file(tree, path);
    return described();
  }
  std::set<std::string> shards;
  for (const auto& [name, shard] : formats::read_index(path)) shards.insert(shard);
  for (const auto& shard : shards) {
    if (!fs::exists(path.parent_path() / shard))
      raise<CheckpointError>(
          "index '{}': there is no file '{}' beside it. Copy all files of the model into one folder.", path.string(),
          shard);
    add_file(tree, path.parent_path() / shard);
  }
  return described();
}

std::optional<fs::path> weights_in(const fs::path& folder) {
  for (const char* name : {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                           "pytorch_model.bin.index.json", "index.json"})
    if (fs::exists(folder / name)) return folder / name;
  return std::nullopt;
}

ModelDescription from_config(const fs::path& path) {
  auto model = describe_architecture(read_text(path));
  model.source = path.string();
  return model;
}

ModelDescription from_path(const fs::path& path) {
  if (!fs::is_directory(path)) {
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
  if (fs::exists(path / "config.json")) {
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
  if (!(std::ifstream(model / "refs" / "main") >> revision) || fs::path(revision).filename() != revision)
    return std::nullopt;
  std::error_code ignored;
  const fs::path files = model / "snapshots" / revision;
  return fs::is_directory(files, ignored) ? std::optional(files) : std::nullopt;
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
  auto model = fs::exists(name) ? from_path(name) : from_name(name);
  model.name = name;
  if (!library.empty() && !model.library.empty() && model.library != library)
    raise<ConfigError>("'{}' is a model of {}, not of {}. Leave out --library_name, or give the other.", name,
                       model.library, library);
  return model;
}

}  // namespace accelerate
