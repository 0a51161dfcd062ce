#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <tuple>

#include <nlohmann/json.hpp>

#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/config.hpp"
#include "accelerate/error.hpp"
#include "bigmodel/built_in_models.hpp"
#include "formats/gguf_header.hpp"
#include "formats/mapped_file.hpp"
#include "formats/torch_container.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || fs::is_directory(path)) throw CheckpointError("can't open '" + path.string() + "': " + std::strerror(errno) + ".");
  return {std::istreambuf_iterator<char>(file), {}};
}

/// What the header of a safetensors file says about its tensors. Names and numbers are all that is wanted here; the reader in the library checks every rule of the format.
json read_header(const fs::path& path) {
  const auto fail = [&](const std::string& what) -> void { throw CheckpointError("safetensors file '" + path.string() + "': " + what); };
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(std::string("can't open it: ") + std::strerror(errno) + ".");
  std::error_code error;
  const auto size = fs::file_size(path, error);
  unsigned char length_bytes[8];
  if (error || !file.read(reinterpret_cast<char*>(length_bytes), sizeof length_bytes)) fail("it has no room for the length of a header. It is truncated or no safetensors file.");
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | length_bytes[i];
  constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's limit
  if (length > kMaxHeaderBytes || length + sizeof length_bytes > size) fail("its header has " + std::to_string(length) + " bytes, the file " + std::to_string(size) + ". It is truncated or no safetensors file.");
  std::string text(length, '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(length))) fail("its header can't be read.");
  auto header = json::parse(text, nullptr, false);
  if (!header.is_object()) fail("its header is not a JSON object. It is damaged.");
  return header;
}

/// PyTorch's name; floating-point numbers become float32, which models are counted in.
std::string counted_as(const std::string& dtype, const fs::path& path) {
  static const std::map<std::string, std::string> kIntegers = {{"BOOL", "bool"}, {"U8", "uint8"},   {"I8", "int8"},   {"I16", "int16"}, {"U16", "uint16"},
                                                               {"I32", "int32"}, {"U32", "uint32"}, {"I64", "int64"}, {"U64", "uint64"}};
  if (const auto found = kIntegers.find(dtype); found != kIntegers.end()) return found->second;
  if (dtype.starts_with("F") || dtype == "BF16") return "float32";
  if (dtype == "C64") return "complex64";
  throw CheckpointError("safetensors file '" + path.string() + "': there is no dtype '" + dtype + "'. It is damaged or of a newer format.");
}

/// Adds a tensor to the tree of modules that its name spells.
void add_tensor(ModuleTree& root, const std::string& name, TensorSpec tensor) {
  constexpr auto kDeepest = 100;
  if (std::count(name.begin(), name.end(), '.') > kDeepest) throw CheckpointError("a tensor has a name of more than " + std::to_string(kDeepest) + " parts: '" + name.substr(0, 60) + "...'. The file is damaged.");
  ModuleTree* module = &root;
  size_t begin = 0;
  for (size_t dot; (dot = name.find('.', begin)) != std::string::npos; begin = dot + 1) {
    const auto part = name.substr(begin, dot - begin);
    auto child = std::find_if(module->children.begin(), module->children.end(), [&](const auto& c) { return c.name == part; });
    if (child == module->children.end()) child = module->children.insert(child, ModuleTree{.name = part, .class_name = "Module"});
    module = &*child;
  }
  tensor.name = name.substr(begin);
  module->parameters.push_back(std::move(tensor));
}

/// Of a file that torch.save or TorchScript wrote: what it says about its tensors, none of which is read.
class TorchFile {
 public:
  /// @param identities  counts up over all files of a model
  TorchFile(const fs::path& path, int64_t& identities)
      : identities_(identities), file_(std::make_shared<formats::InputFile>(path)), container_(file_, 0, file_->size(), "'" + path.string() + "'", {"*"}), pickle_(container_.pickle()) {}

  void add_to(ModuleTree& tree) {
    const auto& root = pickle_.root();
    if (container_.is_script()) return add_module(tree, root, 0);
    if (root.kind != formats::PickleNode::Kind::dict) container_.fail(std::string("it holds ") + formats::to_string(root.kind) + ", expected tensors by their names or a TorchScript module. Save the model's state_dict().");
    for (size_t i = 0; i + 1 < root.items.size(); i += 2) {
      const auto name = pickle_.text(pickle_[root.items[i]], "the name of a tensor");
      auto tensor = spec_of(pickle_[root.items[i + 1]]);
      if (!tensor) container_.fail("under '" + name + "' is " + formats::to_string(pickle_[root.items[i + 1]].kind) + ", expected a tensor. Save the model's state_dict() alone.");
      add_tensor(tree, name, *std::move(tensor));
    }
  }

 private:
  /// An object of a class of the program: what of its attributes are tensors and objects.
  void add_module(ModuleTree& module, const formats::PickleNode& node, int depth) {
    constexpr auto kDeepest = 100;
    if (depth > kDeepest) pickle_.fail(node.at, "modules are nested deeper than " + std::to_string(kDeepest) + " levels. The file is damaged.");
    if (node.kind != formats::PickleNode::Kind::object || node.items.size() < 2) pickle_.fail(node.at, std::string("found ") + formats::to_string(node.kind) + ", expected a TorchScript module.");
    module.class_name = pickle_[node.items[0]].text;
    const auto& state = pickle_.expect(pickle_[node.items[1]], formats::PickleNode::Kind::dict, "what a module consists of");
    for (size_t i = 0; i + 1 < state.items.size(); i += 2) {
      const auto name = pickle_.text(pickle_[state.items[i]], "the name of an attribute");
      const auto& value = pickle_[state.items[i + 1]];
      if (auto tensor = spec_of(value)) {
        tensor->name = name;
        module.parameters.push_back(*std::move(tensor));
      } else if (value.kind == formats::PickleNode::Kind::object) {
        add_module(module.children.emplace_back(ModuleTree{.name = name}), value, depth + 1);
      }
    }
  }

  std::optional<TensorSpec> spec_of(const formats::PickleNode& node) {
    auto tensor = container_.tensor_of(node);
    if (!tensor) return std::nullopt;
    if (tensor->dtype.starts_with("float") || tensor->dtype.starts_with("bfloat")) tensor->dtype = "float32";
    // Those that share a storage from the same element on are one, under several names.
    const auto [seen, is_new] = seen_.try_emplace({tensor->storage, tensor->first, tensor->sizes}, identities_ + 1);
    if (is_new) ++identities_;
    return TensorSpec{.name = "", .shape = tensor->sizes, .dtype = tensor->dtype, .identity = seen->second};
  }

  int64_t& identities_;
  std::shared_ptr<const formats::InputFile> file_;
  formats::TorchContainer container_;
  const formats::Pickle& pickle_;
  std::map<std::tuple<std::string, int64_t, std::vector<int64_t>>, int64_t> seen_;
};

/// By its first bytes, whatever its name: a zip, or a pickle of protocol 2.
bool is_torch_file(const fs::path& path) {
  char begin[4] = {};
  std::ifstream(path, std::ios::binary).read(begin, sizeof begin);
  return std::string_view(begin, 4) == "PK\3\4" || std::string_view(begin, 2) == "\x80\x02";
}

void add_file(ModuleTree& tree, const fs::path& path, int64_t& identities) {
  if (path.extension() != ".safetensors" && is_torch_file(path)) return TorchFile(path, identities).add_to(tree);
  if (path.extension() == ".gguf") {
    const formats::MappedFile file(path);
    for (auto& tensor : formats::parse_gguf_header({file.data(), static_cast<size_t>(file.size())}, path.string()).tensors) add_tensor(tree, tensor.name, {.name = "", .shape = std::move(tensor.shape)});
    return;
  }
  const auto header = read_header(path);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const bool valid = entry.is_object() && entry.contains("dtype") && entry["dtype"].is_string() && entry.contains("shape") && entry["shape"].is_array() &&
                       std::all_of(entry["shape"].begin(), entry["shape"].end(), [](const json& size) { return size.is_number_unsigned() && size.get<int64_t>() >= 0; });
    if (!valid) throw CheckpointError("safetensors file '" + path.string() + "': '" + name + "' has no dtype and shape. Its header is damaged.");
    add_tensor(tree, name, {.name = "", .shape = entry["shape"].get<std::vector<int64_t>>(), .dtype = counted_as(entry["dtype"], path)});
  }
}

ModelDescription from_weights(const fs::path& path) {
  ModelDescription model{.source = path.string()};
  int64_t identities = 0;
  if (path.extension() != ".json") {
    add_file(model.tree, path, identities);
    return model;
  }
  const auto index = json::parse(read_text(path), nullptr, false);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    throw CheckpointError("'" + path.string() + "': it has no object \"weight_map\" from tensor names to file names, so it is no index of a model in several files.");
  std::set<std::string> shards;
  for (const auto& [name, shard] : index["weight_map"].items())
    if (shard.is_string()) shards.insert(shard.get<std::string>());
  for (const auto& shard : shards) {
    if (fs::path(shard).filename() != shard || !fs::exists(path.parent_path() / shard))
      throw CheckpointError("index '" + path.string() + "': there is no file '" + shard + "' beside it. Copy all files of the model into one folder.");
    add_file(model.tree, path.parent_path() / shard, identities);
  }
  return model;
}

std::optional<fs::path> weights_in(const fs::path& folder) {
  for (const char* name : {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"})
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
    if (path.extension() == ".safetensors" || path.extension() == ".gguf" || path.filename().string().ends_with(".index.json") || is_torch_file(path)) return from_weights(path);
    if (path.extension() == ".json") return from_config(path);
    throw ConfigError("'" + path.string() + "': expected a folder, a config.json, a .safetensors or .gguf file, one that torch.save or TorchScript wrote, or an index.");
  }
  const auto weights = weights_in(path);
  if (fs::exists(path / "config.json")) {
    try {
      return from_config(path / "config.json");
    } catch (const ConfigError&) {
      if (!weights) throw;  // else an architecture that is not known, of which the weights say enough
    }
  }
  if (!weights) throw CheckpointError("folder '" + path.string() + "': it has neither config.json nor model.safetensors nor pytorch_model.bin (nor an index of several files). Is it the folder of a saved model?");
  return from_weights(*weights);
}

ModelDescription from_name(const std::string& name) {
  if (const auto* built_in = bigmodel::find_built_in(name)) {
    auto model = describe_architecture(std::string(built_in->config));
    model.source = "built in";
    return model;
  }
  const auto nearest = nearest_name(name, bigmodel::built_in_names());
  std::string known;
  for (const auto& built_in : bigmodel::built_in_names()) known += " " + built_in;
  throw ConfigError("'" + name + "' is neither a file or folder nor the name of a built-in model." + (nearest ? " Did you mean '" + *nearest + "'?" : "") +
                    " Nothing is downloaded: get its config.json (a few KB) and give that. Built-in:" + known + ".");
}

}  // namespace

ModelDescription find_model(const std::string& name, const std::string& library) {
  auto model = fs::exists(name) ? from_path(name) : from_name(name);
  model.name = name;
  if (!library.empty() && !model.library.empty() && model.library != library)
    throw ConfigError("'" + name + "' is a model of " + model.library + ", not of " + library + ". Leave out --library_name, or give the other.");
  return model;
}

}  // namespace accelerate
