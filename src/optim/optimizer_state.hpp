#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>

namespace accelerate::optim {

/// The optimizer's state in the layout of Python's state_dict(). @throws ConfigError for classes without a counterpart.
c10::IValue optimizer_state_dict(torch::optim::Optimizer& optimizer);
/// Takes it over. @throws CheckpointError, having changed nothing.
void load_optimizer_state_dict(torch::optim::Optimizer& optimizer, const c10::IValue& state);
/// Replaces every tensor of the state by f(tensor). Classes that are not known here are left as they are.
void map_optimizer_state(torch::optim::Optimizer& optimizer, const std::function<at::Tensor(const at::Tensor&)>& f);

}  // namespace accelerate::optim
