#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace accelerate::optim {

/// The optimizer's state in the layout of Python's state_dict(). @throws ConfigError for classes without a counterpart.
c10::IValue optimizer_state_dict(torch::optim::Optimizer& optimizer);
/// Takes it over. @throws CheckpointError, having changed nothing.
void load_optimizer_state_dict(torch::optim::Optimizer& optimizer, const c10::IValue& state);
/// Gives a tensor of a parameter's state its values. @param to  as a step makes it  @param saved  the dict's, of the
/// same sizes
using FillState = std::function<void(const at::Tensor& parameter, const at::Tensor& to, const at::Tensor& saved)>;
/// The same without a copy: `fill` is told what each tensor shall become, and it is for the caller to write that, at
/// once or later. Not for an OwnStateDict.
/// @param in_place  tensors that are there and are as a step would make them stay; else all are made anew
/// @return what gives back the options and tensors that were there  @throws CheckpointError, having changed nothing.
std::function<void()> take_optimizer_state_dict(torch::optim::Optimizer& optimizer, const c10::IValue& state,
                                                bool in_place, const FillState& fill);
/// One of LibTorch's that are known to be element-wise, or a StepsOnShards.
bool steps_on_pieces(const torch::optim::Optimizer& optimizer);
/// The states of parameters that `is_piece` names are of this rank's shards: torch::save() of the optimizer, which
/// would write them as if they were whole, is refused from here on. Classes that are not known here are left as they
/// are.
void refuse_torch_save(torch::optim::Optimizer& optimizer, const std::function<bool(const void* parameter)>& is_piece);
/// An OwnStateDict: what it holds is for nobody to look into.
bool has_own_state_dict(const torch::optim::Optimizer& optimizer);
/// The state that it would hold of a parameter of the group before the first step, by Python's names: {"step": 0,
/// "exp_avg": zeros, …}. Empty where it would hold nothing. @throws ConfigError for classes without a counterpart.
std::map<std::string, at::Tensor> initial_state(torch::optim::Optimizer& optimizer,
                                                const torch::optim::OptimizerParamGroup& group,
                                                const at::Tensor& parameter);
/// The tensors that the optimizer holds for these parameters. @throws ConfigError for classes whose states are not
/// known here.
std::vector<at::Tensor> states_of(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters);
/// Replaces every tensor of the state by f(tensor). Classes that are not known here are left as they are.
void map_optimizer_state(torch::optim::Optimizer& optimizer, const std::function<at::Tensor(const at::Tensor&)>& f);
/// The optimizer's state of `from`, which a group lists, becomes that of `to`, every tensor replaced by f(tensor) in
/// the type that a step on `to` makes; f sees the tensors that have one value per element of the parameter. Without a
/// state of `from` nothing happens. Classes that are not known here keep the state where it is.
void move_optimizer_state(torch::optim::Optimizer& optimizer, const at::Tensor& from, const at::Tensor& to,
                          const std::function<at::Tensor(const at::Tensor&)>& f);

}  // namespace accelerate::optim
