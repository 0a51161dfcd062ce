#include <c10/core/GradMode.h>

#include <set>
#include <tuple>

#include "accelerate/checkpoint.hpp"
#include "checkpoint/model_state.hpp"
#include "residency/homes/encoded.hpp"
#include "snapshot/ledger.hpp"
#include "utils/raise.hpp"

namespace accelerate::checkpointing {
namespace {

/// Equal for tensors that are the same memory seen the same way.
auto memory_of(const at::Tensor& tensor) {
  return std::make_tuple(tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(), tensor.sizes().vec(),
                         tensor.strides().vec());
}

}  // namespace

std::map<std::string, at::Tensor> state_dict(const ModelRef& model,
                                             const std::function<at::Tensor(const at::Tensor&)>& value_of) {
  std::map<std::string, at::Tensor> result;
  std::set<decltype(memory_of(at::Tensor()))> seen;
  for (const auto& [name, tensor] : model.state())
    if (tensor.numel() == 0 || seen.insert(memory_of(tensor)).second) result.emplace(name, value_of(tensor));
  return result;
}

std::map<std::string, at::Tensor> every_name(const ModelRef& model,
                                             const std::function<at::Tensor(const at::Tensor&)>& value_of) {
  std::map<std::string, at::Tensor> result;
  std::map<decltype(memory_of(at::Tensor())), at::Tensor> values;
  for (const auto& [name, tensor] : model.state()) {
    at::Tensor own;
    at::Tensor& value = tensor.numel() == 0 ? own : values[memory_of(tensor)];
    if (!value.defined()) value = value_of(tensor);
    result.emplace(name, value);
  }
  return result;
}

std::map<std::string, at::Tensor> each_memory_once(std::map<std::string, at::Tensor> tensors) {
  std::set<decltype(memory_of(at::Tensor()))> seen;
  std::erase_if(tensors, [&](const auto& item) {
    return item.second.has_storage() && item.second.numel() > 0 && !seen.insert(memory_of(item.second)).second;
  });
  return tensors;
}

at::Tensor value_of(const at::Tensor& tensor) {
  const at::Tensor value = tensor.detach();
  return residency::encoded_weight(tensor) != nullptr ? value.clone() : value.cpu();
}

std::map<std::string, at::Tensor> state_dict(const ModelRef& model) { return state_dict(model, value_of); }

namespace {

/// A line for each tensor that only one of them has, or with another size. @param where  "the file" of `tensors`
/// @param sizes  of whole tensors, as check_weights()
std::string differences_between(const ModelRef& model, const std::map<std::string, at::Tensor>& tensors,
                                const char* where, const Sizes* sizes) {
  const auto state = model.state();
  std::set<decltype(memory_of(at::Tensor()))> present;
  std::set<std::string> known;
  std::string differences;
  for (const auto& [name, tensor] : state) {
    known.insert(name);
    const auto found = tensors.find(name);
    if (found == tensors.end()) continue;
    present.insert(memory_of(tensor));
    const auto whole = sizes ? sizes->find(name) : Sizes::const_iterator();
    const auto expected = sizes && whole != sizes->end() ? at::IntArrayRef(whole->second) : tensor.sizes();
    if (found->second.sizes() != expected)
      differences += fmt::format("\n  '{}': {} has {}, the model {}", name, where, found->second.sizes(), expected);
  }
  for (const auto& [name, tensor] : state)
    if (!tensors.contains(name) && !present.contains(memory_of(tensor)))
      differences += fmt::format("\n  '{}': missing in {}", name, where);
  for (const auto& [name, tensor] : tensors)
    if (!known.contains(name)) differences += fmt::format("\n  '{}': not in the model", name);
  return differences;
}

}  // namespace

void check_state_dict(const ModelRef& model, const std::map<std::string, at::Tensor>& tensors) {
  const auto differences = differences_between(model, tensors, "the file", nullptr);
  if (!differences.empty())
    raise<CheckpointError>(
        "loading a model: the weights don't fit it, expected the same names and shapes; nothing was loaded. Build the "
        "model with the options that it was saved with. Differences:{}",
        differences);
}

void check_weights(const ModelRef& model, const std::map<std::string, at::Tensor>& weights, const Sizes* sizes) {
  if (weights.empty())
    throw CheckpointError(
        "saving a model: there are no weights. Of a sharded model rank 0 has what get_state_dict() gives, which all "
        "ranks call: save on the main process");
  const auto differences = differences_between(model, weights, "the given state", sizes);
  if (!differences.empty())
    raise<CheckpointError>(
        "saving a model: the given weights don't fit it, expected its names and whole shapes; nothing was written. "
        "Differences:{}",
        differences);
}

void load_state_dict(const ModelRef& model, const std::map<std::string, at::Tensor>& tensors) {
  check_state_dict(model, tensors);
  snapshot::keep_all();
  const auto state = model.state();
  at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : state)
    if (const auto found = tensors.find(name); found != tensors.end()) at::Tensor(tensor).detach().copy_(found->second);
}

}  // namespace accelerate::checkpointing
