#include "accelerate/optim/deepspeed_adam.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "optim/describe_own.hpp"
#include "optim/own_step.hpp"

namespace accelerate::optim {

DeepSpeedAdam::DeepSpeedAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                             const DeepSpeedAdamOptions& defaults)
    : OwnOptimizer(DescribeDeepSpeedAdam::kName, std::make_unique<DeepSpeedAdamOptions>(defaults)) {
  add_param_groups(groups);
}

std::unique_ptr<torch::optim::OptimizerOptions> DeepSpeedAdam::options_for(
    const torch::optim::OptimizerParamGroup& group) const {
  return options_of_own<DescribeDeepSpeedAdam>(group, defaults());
}

void DeepSpeedAdam::step_on(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) {
  const auto& o = static_cast<const DeepSpeedAdamOptions&>(options);
  auto& state = state_at<DeepSpeedAdamParamState>(*this, parameter, [&](auto& made) {
    const auto type = DescribeDeepSpeedAdam::state_type(o, parameter);
    made.exp_avg(at::zeros_like(parameter, type)).exp_avg_sq(at::zeros_like(parameter, type));
  });
  state.step(state.step() + 1);
  const auto [beta1, beta2] = o.betas();
  const auto step = static_cast<double>(state.step());
  const double correction1 = o.bias_correction() ? 1 - std::pow(beta1, step) : 1;
  const double correction2 = o.bias_correction() ? std::sqrt(1 - std::pow(beta2, step)) : 1;
  const Wide p(parameter), grad(parameter.grad()), m(state.exp_avg()), v(state.exp_avg_sq());
  const auto g = o.adam_w_mode() ? grad.value : grad.value.add(p.value, o.weight_decay());
  m.value.mul_(beta1).add_(g, 1 - beta1);
  v.value.mul_(beta2).addcmul_(g, g, 1 - beta2);
  if (o.adam_w_mode()) p.value.mul_(1 - o.lr() * o.weight_decay());
  p.value.addcdiv_(m.value, v.value.sqrt().div_(correction2).add_(o.eps()), -o.lr() / correction1);
  p.put(), m.put(), v.put();
}

}  // namespace accelerate::optim
