#include <algorithm>
#include <cstdlib>
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

void add_file(bigmodel::FileTree& tree, const fs::path& path) {
  if (path.extension() != ".safetensors" && is_torch_file(path)) return bigmodel::add_torch_file(tree, path);
  if (path.extension() == ".gguf") {
    const formats::MappedFile file(path);
    auto header = formats::parse_gguf_header({file.data(), static_cast<size_t>(file.size())}, path.string());
    formats::check_gguf_data(header, file.size(), path.string());
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
  const auto described = [&] { return ModelDescription{.source = path.string(), .tree = std::move(tree.root())}; };
  if (path.extension() != ".json") {
    add_file(tree, path);
    return described();
  }
  std::set<std::string> shards;
  for (const auto& [name, shard] : formats::read_index(path)) shards.insert(shard);
  for (const auto& shard : shards) {
    if (!is_there(path.parent_path() / shard))
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
    if (is_there(folder / name)) return folder / name;
  return std::nullopt;
}

ModelDescription from_config(const fs::path& path) {
  auto model = describe_architecture(read_text<CheckpointError>("", path, kMostSettingsBytes));
  model.source = path.string();
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
