#include <c10/core/GradMode.h>

#include <set>
#include <tuple>

#include "accelerate/checkpoint.hpp"
#include "accelerate/utils/error.hpp"

namespace accelerate::checkpointing {
namespace {

/// Equal for tensors that are the same memory seen the same way.
auto memory_of(const at::Tensor& tensor) {
  return std::make_tuple(tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(), tensor.sizes().vec(),
                         tensor.strides().vec());
}

std::string shape_of(const at::Tensor& tensor) {
  std::string text = "[";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) text += (dim ? ", " : "") + std::to_string(tensor.size(dim));
  return text + "]";
}

}  // namespace

std::map<std::string, at::Tensor> state_dict(const ModelRef& model) {
  std::map<std::string, at::Tensor> result;
  std::set<decltype(memory_of(at::Tensor()))> seen;
  for (const auto& [name, tensor] : model.state())
    if (tensor.numel() == 0 || seen.insert(memory_of(tensor)).second) result.emplace(name, tensor.detach().cpu());
  return result;
}

void check_state_dict(const ModelRef& model, const std::map<std::string, at::Tensor>& tensors) {
  const auto state = model.state();
  std::set<decltype(memory_of(at::Tensor()))> present;
  std::set<std::string> known;
  std::string differences;
  for (const auto& [name, tensor] : state) {
    known.insert(name);
    const auto found = tensors.find(name);
    if (found == tensors.end()) continue;
    present.insert(memory_of(tensor));
    if (found->second.sizes() != tensor.sizes())
      differences += "\n  '" + name + "': the file has " + shape_of(found->second) + ", the model " + shape_of(tensor);
  }
  for (const auto& [name, tensor] : state)
    if (!tensors.contains(name) && !present.contains(memory_of(tensor)))
      differences += "\n  '" + name + "': missing in the file";
  for (const auto& [name, tensor] : tensors)
    if (!known.contains(name)) differences += "\n  '" + name + "': not in the model";
  if (!differences.empty())
    throw CheckpointError(
        "loading a model: the weights don't fit it, expected the same names and shapes; nothing was loaded. Build the "
        "model with the options that it was saved with. Differences:" +
        differences);
}

void load_state_dict(const ModelRef& model, const std::map<std::string, at::Tensor>& tensors) {
  check_state_dict(model, tensors);
  const auto state = model.state();
  at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : state)
    if (const auto found = tensors.find(name); found != tensors.end()) at::Tensor(tensor).detach().copy_(found->second);
}

}  // namespace accelerate::checkpointing
