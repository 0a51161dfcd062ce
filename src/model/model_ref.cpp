#include "accelerate/model/model_ref.hpp"

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <set>
#include <string_view>

#include "accelerate/model/submodule.hpp"

namespace accelerate {
namespace {

struct StateOf {
  NamedTensors parameters, buffers, all;
};

/// In the order of Python's state_dict: a module's parameters, its buffers, then its children.
void collect(const torch::nn::Module& module, const std::string& prefix, StateOf& state) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    state.parameters.emplace_back(prefix + item.key(), item.value());
    state.all.emplace_back(prefix + item.key(), item.value());
  }
  for (const auto& item : module.named_buffers(/*recurse=*/false)) {
    state.buffers.emplace_back(prefix + item.key(), item.value());
    state.all.emplace_back(prefix + item.key(), item.value());
  }
  for (const auto& child : module.named_children()) collect(*child.value(), prefix + child.key() + ".", state);
}

StateOf state_of(const std::shared_ptr<torch::nn::Module>& module, const std::shared_ptr<torch::jit::Module>& script) {
  StateOf state;
  if (module) {
    collect(*module, "", state);
  } else {
    for (const auto& item : script->named_parameters(true)) state.parameters.emplace_back(item.name, item.value);
    for (const auto& item : script->named_buffers(true)) state.buffers.emplace_back(item.name, item.value);
    state.all = state.parameters;
    state.all.insert(state.all.end(), state.buffers.begin(), state.buffers.end());
  }
  return state;
}

NamedTensors once(const NamedTensors& named) {
  NamedTensors result;
  std::set<const at::TensorImpl*> seen;
  for (const auto& [name, tensor] : named)
    if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) result.emplace_back(name, tensor);
  return result;
}

/// "a::b::LayerImpl<c::D>" and "__torch__.a.___torch_mangle_3.Layer" are "Layer".
std::string own_name(std::string qualified, const std::string& separator) {
  if (qualified.ends_with('>')) {
    size_t at = qualified.size();
    for (int64_t depth = 0; at > 0;) {
      --at;
      depth += (qualified[at] == '>') - (qualified[at] == '<');
      if (depth == 0) break;
    }
    qualified.resize(at);
  }
  if (const auto last = qualified.rfind(separator); last != std::string::npos)
    qualified.erase(0, last + separator.size());
  constexpr std::string_view kHolderSuffix = "Impl";
  if (separator == "::" && qualified.size() > kHolderSuffix.size() && qualified.ends_with(kHolderSuffix))
    qualified.resize(qualified.size() - kHolderSuffix.size());
  return qualified;
}

void walk(torch::nn::Module& module, const std::string& path, int64_t parent, std::vector<Submodule>& all) {
  const auto index = static_cast<int64_t>(all.size());
  Submodule item{.path = path,
                 .class_name = own_name(module.name(), "::"),
                 .qualified_class_name = module.name(),
                 .parent = parent,
                 .identity = &module,
                 .module = &module};
  for (const auto& parameter : module.named_parameters(/*recurse=*/false))
    if (parameter.value().defined()) item.parameters.emplace_back(parameter.key(), parameter.value());
  all.push_back(std::move(item));
  for (const auto& child : module.named_children())
    if (child.value()) walk(*child.value(), path.empty() ? child.key() : path + "." + child.key(), index, all);
}

void walk(const torch::jit::Module& module, const std::string& path, int64_t parent, std::vector<Submodule>& all) {
  const auto index = static_cast<int64_t>(all.size());
  const std::string name = module.type()->name() ? module.type()->name()->qualifiedName() : "";
  Submodule item{.path = path,
                 .class_name = own_name(name, "."),
                 .qualified_class_name = name,
                 .parent = parent,
                 .identity = module._ivalue().get()};
  for (const auto& parameter : module.named_parameters(/*recurse=*/false))
    if (parameter.value.defined()) item.parameters.emplace_back(parameter.name, parameter.value);
  all.push_back(std::move(item));
  for (const auto& child : module.named_children())
    walk(child.value, path.empty() ? child.name : path + "." + child.name, index, all);
}

}  // namespace

ModelRef::ModelRef(const torch::jit::Module& module) : script_(std::make_shared<torch::jit::Module>(module)) {}

std::vector<Submodule> ModelRef::submodules() const {
  std::vector<Submodule> all;
  if (module_) walk(*module_, "", -1, all);
  else walk(*script_, "", -1, all);
  return all;
}

NamedTensors ModelRef::parameters() const { return once(state_of(module_, script_).parameters); }
NamedTensors ModelRef::buffers() const { return once(state_of(module_, script_).buffers); }

NamedTensors ModelRef::state() const {
  NamedTensors result;
  for (auto& item : state_of(module_, script_).all)
    if (item.second.defined()) result.push_back(std::move(item));
  return result;
}

void ModelRef::to(const at::Device& device) const {
  if (module_) module_->to(device);
  else script_->to(device);
}

bool ModelRef::is_training() const { return module_ ? module_->is_training() : script_->is_training(); }

const void* ModelRef::identity() const {
  return module_ ? static_cast<const void*>(module_.get()) : script_->_ivalue().get();
}

}  // namespace accelerate
