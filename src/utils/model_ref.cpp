#include <set>

#include "accelerate/model_ref.hpp"

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

StateOf state_of(const std::shared_ptr<torch::nn::Module>& module, const std::optional<torch::jit::Module>& script) {
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

}  // namespace

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
  else torch::jit::Module(*script_).to(device);
}

const void* ModelRef::identity() const { return module_ ? static_cast<const void*>(module_.get()) : script_->_ivalue().get(); }

}  // namespace accelerate
