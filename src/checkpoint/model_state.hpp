#pragma once

#include <functional>
#include <map>
#include <string>

#include "accelerate/model/model_ref.hpp"
#include "checkpoint/universal_folder.hpp"

namespace accelerate::checkpointing {

/// As state_dict(model), with values from `value_of`, which is asked once for each of the model's tensors (tied weights
/// once, under their first name), in the order of the model's state.
std::map<std::string, at::Tensor> state_dict(const ModelRef& model,
                                             const std::function<at::Tensor(const at::Tensor& tensor)>& value_of);

/// The same under every name, as Python's state_dict() has it: names of one tensor share one value.
std::map<std::string, at::Tensor> every_name(const ModelRef& model,
                                             const std::function<at::Tensor(const at::Tensor& tensor)>& value_of);
/// Without names of memory that an earlier name has: what a file of safetensors may hold.
std::map<std::string, at::Tensor> each_memory_once(std::map<std::string, at::Tensor> tensors);

/// Weights that are to be saved in a model's place fit it: of tied ones at least one name is there.
/// @param sizes  of whole tensors by name, where modules compute with parts of them; null: the modules'
/// @throws CheckpointError listing every missing, unexpected and misshapen tensor; with none at all it says who has
/// them
void check_weights(const ModelRef& model, const std::map<std::string, at::Tensor>& weights,
                   const Sizes* sizes = nullptr);

/// On the CPU. A copy of the values of a weight in few bits; otherwise the tensor's memory, if it is there already.
at::Tensor value_of(const at::Tensor& tensor);

}  // namespace accelerate::checkpointing
