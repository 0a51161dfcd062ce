#include <cstdint>
#include <set>
#include <unordered_map>

#include "accelerate/bigmodel.hpp"
#include "accelerate/config.hpp"
#include "accelerate/model/submodule.hpp"
#include "formats/torch_dtypes.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

TensorSpec spec_of(const std::string& name, const at::Tensor& tensor) {
  const auto* dtype = formats::find_torch_dtype(tensor.scalar_type());
  if (!dtype)
    raise<ConfigError>("describe: '{}' has the dtype {}, which has no size in a saved model.", name,
                       c10::toString(tensor.scalar_type()));
  constexpr std::string_view kPrefix = "torch.";
  return {.name = name,
          .shape = tensor.sizes().vec(),
          .dtype = std::string(dtype->name.substr(kPrefix.size())),
          .identity = reinterpret_cast<int64_t>(tensor.unsafeGetTensorImpl())};
}

}  // namespace

ModuleTree describe(const ModelRef& model) {
  const auto modules = model.submodules();
  std::unordered_map<std::string, size_t> index;
  std::vector<std::vector<size_t>> children(modules.size());
  std::vector<std::vector<TensorSpec>> buffers(modules.size());
  for (size_t i = 0; i < modules.size(); ++i) {
    index.emplace(modules[i].path, i);
    if (modules[i].parent >= 0) children[static_cast<size_t>(modules[i].parent)].push_back(i);
  }
  for (const auto& [name, tensor] : model.buffers()) {
    const auto dot = name.rfind('.');
    const auto owner = index.find(dot == std::string::npos ? "" : name.substr(0, dot));
    if (owner == index.end()) raise<InternalError>("describe: the buffer '{}' is in no module.", name);
    buffers[owner->second].push_back(spec_of(dot == std::string::npos ? name : name.substr(dot + 1), tensor));
  }
  const auto build = [&](const auto& self, size_t at) -> ModuleTree {
    const auto& path = modules[at].path;
    ModuleTree tree{.name = path.substr(path.rfind('.') == std::string::npos ? 0 : path.rfind('.') + 1),
                    .class_name = modules[at].class_name,
                    .buffers = std::move(buffers[at])};
    for (const auto& [name, tensor] : modules[at].parameters) tree.parameters.push_back(spec_of(name, tensor));
    for (const size_t child : children[at]) tree.children.push_back(self(self, child));
    return tree;
  };
  return build(build, 0);
}

ModuleTree bigmodel::describe_for(const char* caller, const ModelRef& model,
                                  const std::vector<std::string>& no_split_module_classes) {
  auto tree = describe(model);
  std::set<std::string> present;
  if (!no_split_module_classes.empty())
    for (const auto& module : model.submodules()) present.insert(module.class_name);
  for (const auto& name : no_split_module_classes) {
    if (present.contains(name)) continue;
    const auto nearest = nearest_name(name, {present.begin(), present.end()});
    raise<ConfigError>(
        "{}: no_split_module_classes names '{}', which is no class of a module of this model, expected some of {}{}",
        caller, name, fmt::join(present, ", "), nearest ? fmt::format("; did you mean {}?", *nearest) : "");
  }
  return tree;
}

}  // namespace accelerate
