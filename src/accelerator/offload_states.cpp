#include "accelerate/accelerator/offload_states.hpp"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "accelerate/comm.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "optim/optimizer_state.hpp"
#include "parallel/layer.hpp"
#include "run_state/holdings.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::detail {
namespace {

using OptimizerOfModel = std::pair<AcceleratedOptimizer, std::vector<at::Tensor>>;

/// The prepared optimizers that step on what the model holds, with what they step on. @throws ConfigError where none
/// does, as DeepSpeed
std::vector<OptimizerOfModel> optimizers_stepping_on(const run_state::RunState& run, const PreparedModel& model) {
  std::vector<OptimizerOfModel> all;
  for (const auto& optimizer : run.optimizers) {
    std::vector<at::Tensor> of_model;
    for (const auto& held : run_state::holdings_of(model))
      for (const auto& group : optimizer.param_groups())
        for (const auto& parameter : group.params())
          if (parameter.is_same(held.value)) of_model.push_back(parameter);
    if (!of_model.empty()) all.emplace_back(optimizer, std::move(of_model));
  }
  if (all.empty())
    throw ConfigError(
        "offload_states: no prepared optimizer trains the model, expected one, as in DeepSpeed; prepare them together");
  return all;
}

std::vector<at::Tensor> states_of(const std::vector<OptimizerOfModel>& optimizers) {
  std::vector<at::Tensor> states;
  for (const auto& [optimizer, parameters] : optimizers) {
    if (optim::has_own_state_dict(optimizer.optimizer()))
      throw ConfigError(
          "offload_states: an optimizer keeps its states in a form of its own (codes), expected one whose states are "
          "tensors; leave optim_states out of `include`");
    const auto more = optim::states_of(optimizer.optimizer(), parameters);
    states.insert(states.end(), more.begin(), more.end());
  }
  return states;
}

}  // namespace

void offload_states(const PreparedModel& model, const OffloadStatesOptions& options) {
  using enum OffloadStateTypeEnum;
  const auto trained = deepspeed_run_of(model, "offload_states");
  const auto optimizers = optimizers_stepping_on(*trained.run, *trained.model);
  if (options.device == OffloadDeviceEnum::nvme)
    throw ConfigError(
        "offload_states: device is nvme, expected cpu: states go to memory of the host only, as in DeepSpeed; write "
        "offload_optimizer into the configuration to keep them elsewhere from the start");
  if (options.device == OffloadDeviceEnum::none) {
    if (comm::rank() == 0)
      logs::warn("accelerate.accelerator", "offload_states: device is none, so nothing was offloaded; expected cpu");
    return;
  }
  static std::once_flag told;
  if (comm::rank() == 0 && model.device_type == at::kCPU)
    std::call_once(told, [] {
      logs::warn("accelerate.accelerator",
                 "offload_states: the model computes on the host, where its states lie and stay; what is gathered and "
                 "buffers of gradients are freed");
    });
  const auto which =
      options.include.value_or(std::vector{optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer});
  const bool with_states = std::find(which.begin(), which.end(), optim_states) != which.end();
  for (const auto& layer : trained.model->engine->layers())
    layer->offload_states({.which = which,
                           .optimizer_states = with_states ? states_of(optimizers) : std::vector<at::Tensor>{},
                           .pin_memory = options.pin_memory,
                           .non_blocking = options.non_blocking});
}

void reload_states(const PreparedModel& model, bool non_blocking) {
  const auto trained = deepspeed_run_of(model, "reload_states");
  for (const auto& layer : trained.model->engine->layers()) layer->reload_states(non_blocking);
}

}  // namespace accelerate::detail
