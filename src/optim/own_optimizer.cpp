#include "accelerate/optim/own_optimizer.hpp"

#include <ATen/core/grad_mode.h>

#include "optim/begin_step.hpp"
#include "utils/raise.hpp"

namespace accelerate::optim {

using torch::optim::OptimizerParamGroup;

OwnOptimizer::OwnOptimizer(const char* name, std::unique_ptr<torch::optim::OptimizerOptions> defaults)
    : Optimizer(std::vector<OptimizerParamGroup>(), std::move(defaults)), name_(name) {}

void OwnOptimizer::add_param_groups(const std::vector<OptimizerParamGroup>& groups) {
  // Also where no group would say so.
  static_cast<void>(options_for(OptimizerParamGroup(std::vector<at::Tensor>(), defaults().clone())));
  for (const auto& group : groups) add_param_group(group);
}

void OwnOptimizer::add_param_group(const OptimizerParamGroup& group) {
  auto options = options_for(group);
  for (const auto& parameter : group.params())
    if (!parameter.is_floating_point())
      raise<ConfigError>("{}: found a parameter of {} {}, expected floating-point numbers", name_,
                         c10::toString(parameter.scalar_type()), parameter.sizes());
  Optimizer::add_param_group(OptimizerParamGroup(group.params()));
  param_groups().back().set_options(std::move(options));
}

at::Tensor OwnOptimizer::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  const at::Tensor loss = begin_step(*this, name_, closure);
  step_on_all();
  return loss;
}

void OwnOptimizer::step_on_all() {
  for (const auto& group : param_groups())
    for (const auto& parameter : group.params())
      if (parameter.grad().defined()) step_on(parameter, group.options());
}

void OwnOptimizer::save(torch::serialize::OutputArchive& archive) const {
  static_cast<void>(archive);
  raise<ConfigError>(
      "torch::save: {} has no layout in LibTorch's archives; write AcceleratedOptimizer's state_dict() by "
      "accelerate::checkpointing, or let Accelerator::save_state do it",
      name_);
}
void OwnOptimizer::load(torch::serialize::InputArchive& archive) {
  static_cast<void>(archive);
  raise<ConfigError>(
      "torch::load: {} has no layout in LibTorch's archives; read by AcceleratedOptimizer's load_state_dict(), or let "
      "Accelerator::load_state do it",
      name_);
}

}  // namespace accelerate::optim
