#include "bigmodel/torch_file.hpp"

#include <map>
#include <tuple>

#include "formats/torch_container.hpp"

namespace accelerate::bigmodel {
namespace {

using Kind = formats::PickleNode::Kind;

class TorchFile {
 public:
  TorchFile(FileTree& tree, const std::filesystem::path& path)
      : tree_(tree),
        file_(std::make_shared<formats::InputFile>(path)),
        container_(file_, 0, file_->size(), "'" + path.string() + "'", {"*"}),
        pickle_(container_.pickle()) {}

  void add() {
    const auto& root = pickle_.root();
    if (container_.is_script()) return add_module(tree_.root(), root, 0, 0);
    if (root.kind != Kind::dict)
      container_.fail(
          "it holds {}, expected tensors by their names or a TorchScript module. Save the model's state_dict().",
          formats::to_string(root.kind));
    std::map<std::string, Kind> kinds;  // of keys: a number and its digits name one tensor
    for (size_t i = 0; i + 1 < root.items.size(); i += 2) {
      const auto& key = pickle_[root.items[i]];
      const auto name =
          key.kind == Kind::integer ? std::to_string(key.integer) : pickle_.text(key, "the name of a tensor");
      if (kinds.try_emplace(name, key.kind).first->second != key.kind)
        container_.fail("it has the key {0} as a number and as the text '{0}'. Save the model's state_dict() alone.",
                        name);
      auto tensor = spec_of(pickle_[root.items[i + 1]]);
      if (!tensor)
        container_.fail("under '{}' is {}, expected a tensor. Save the model's state_dict() alone.", name,
                        formats::to_string(pickle_[root.items[i + 1]].kind));
      tree_.add(name, *std::move(tensor));
    }
  }

 private:
  /// An object of a class of the program: what of its attributes are tensors and objects. All attributes count, since
  /// one object can be in many places.
  /// @param path_bytes  of the dotted name
  void add_module(ModuleTree& module, const formats::PickleNode& node, int depth, size_t path_bytes) {
    if (depth > FileTree::kDeepest)
      pickle_.fail(node.at, "modules are nested deeper than {} levels. The file is damaged.", FileTree::kDeepest);
    if (node.kind != Kind::object || node.items.size() < 2)
      pickle_.fail(node.at, "found {}, expected a TorchScript module.", formats::to_string(node.kind));
    const auto class_name = pickle_[node.items[0]].text;
    tree_.count(path_bytes + class_name.size());
    module.class_name = class_name;
    const auto& state = pickle_.expect(pickle_[node.items[1]], Kind::dict, "what a module consists of");
    for (size_t i = 0; i + 1 < state.items.size(); i += 2) {
      const auto name = pickle_.expect(pickle_[state.items[i]], Kind::text, "the name of an attribute").text;
      const auto name_bytes = path_bytes + (path_bytes > 0 ? 1 : 0) + name.size();
      tree_.count(name_bytes);
      const auto& value = pickle_[state.items[i + 1]];
      if (auto tensor = spec_of(value)) {
        tensor->name = name;
        module.parameters.push_back(*std::move(tensor));
      } else if (value.kind == Kind::object) {
        add_module(module.children.emplace_back(ModuleTree{.name = std::string(name)}), value, depth + 1, name_bytes);
      }
    }
  }

  std::optional<TensorSpec> spec_of(const formats::PickleNode& node) {
    auto tensor = container_.tensor_of(node);
    if (!tensor) return std::nullopt;
    const auto width = width_of(node, tensor->dtype);
    if (!container_.is_script())
      check_storage(node, *tensor, width);  // which TorchScript leaves out on the meta device
    if (tensor->dtype.starts_with("float") || tensor->dtype.starts_with("bfloat")) tensor->dtype = "float32";
    // Tensors that share a storage from the same element on are one, under several names.
    const auto [seen, is_new] = seen_.try_emplace({tensor->storage, tensor->first, tensor->sizes});
    if (is_new) seen->second = tree_.new_identity();
    return TensorSpec{.name = "", .shape = tensor->sizes, .dtype = tensor->dtype, .identity = seen->second};
  }

  /// Bytes of an element. The name may be any that a file gives.
  int64_t width_of(const formats::PickleNode& node, const std::string& dtype) const {
    try {
      return static_cast<int64_t>(dtype_byte_size(dtype));
    } catch (const ConfigError& error) {
      pickle_.fail(node.at, "{}", error.what());
    }
  }

  /// Checks what loading would check: that its elements are there.
  void check_storage(const formats::PickleNode& node, const formats::PickledTensor& tensor, int64_t width) const {
    const auto bytes = container_.storage(tensor.storage).size;
    if (width > 0 && tensor.last >= bytes / width)
      pickle_.fail(node.at,
                   "a tensor of size {} and stride {} from element {} does not fit into the {} bytes of its storage.",
                   tensor.sizes, tensor.strides, tensor.first, bytes);
  }

  FileTree& tree_;
  std::shared_ptr<const formats::InputFile> file_;
  formats::TorchContainer container_;
  const formats::Pickle& pickle_;
  std::map<std::tuple<std::string, int64_t, std::vector<int64_t>>, int64_t> seen_;
};

}  // namespace

void add_torch_file(FileTree& tree, const std::filesystem::path& path) { TorchFile(tree, path).add(); }

}  // namespace accelerate::bigmodel
