#include "accelerate/accelerator/offload_states.hpp"

#include <mutex>

#include "accelerate/comm.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "optim/optimizer_state.hpp"
#include "parallel/layer.hpp"
#include "run_state/holdings.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::detail {
namespace {

/// What prepared optimizers keep of what the model holds. @throws ConfigError where none does, as DeepSpeed
std::vector<at::Tensor> optimizer_states_of(const run_state::RunState& run, const PreparedModel& model) {
  std::vector<at::Tensor> states;
  bool any = false;
  for (const auto& optimizer : run.optimizers) {
    std::vector<at::Tensor> of_model;
    for (const auto& held : run_state::holdings_of(model))
      for (const auto& group : optimizer.param_groups())
        for (const auto& parameter : group.params())
          if (parameter.is_same(held.value)) of_model.push_back(parameter);
    if (of_model.empty()) continue;
    any = true;
    const auto more = optim::states_of(optimizer.optimizer(), of_model);
    states.insert(states.end(), more.begin(), more.end());
  }
  if (!any)
    throw ConfigError(
        "offload_states: no prepared optimizer trains the model, expected one, as in DeepSpeed; prepare them together");
  return states;
}

}  // namespace

void offload_states(const PreparedModel& model, const OffloadStatesOptions& options) {
  using enum OffloadStateTypeEnum;
  const auto trained = deepspeed_run_of(model, "offload_states");
  const auto states = optimizer_states_of(*trained.run, *trained.model);
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
  for (const auto& layer : trained.model->engine->layers())
    layer->offload_states({.which = options.include.value_or(
                               std::vector{optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer}),
                           .optimizer_states = states,
                           .pin_memory = options.pin_memory,
                           .non_blocking = options.non_blocking});
}

void reload_states(const PreparedModel& model, bool non_blocking) {
  const auto trained = deepspeed_run_of(model, "reload_states");
  for (const auto& layer : trained.model->engine->layers()) layer->reload_states(non_blocking);
}

}  // namespace accelerate::detail
