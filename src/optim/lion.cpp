#include "accelerate/optim/lion.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "optim/describe_own.hpp"
#include "optim/own_step.hpp"

namespace accelerate::optim {

Lion::Lion(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LionOptions& defaults)
    : OwnOptimizer(DescribeLion::kName, std::make_unique<LionOptions>(defaults)) {
  add_param_groups(groups);
}

std::unique_ptr<torch::optim::OptimizerOptions> Lion::options_for(
    const torch::optim::OptimizerParamGroup& group) const {
  return options_of_own<DescribeLion>(group, defaults());
}

void Lion::step_on(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) {
  const auto& o = static_cast<const LionOptions&>(options);
  auto& state =
      state_at<LionParamState>(*this, parameter, [&](auto& made) { made.exp_avg(at::zeros_like(parameter)); });
  state.step(state.step() + 1);
  const auto [beta1, beta2] = o.betas();
  const Wide p(parameter), g(parameter.grad()), m(state.exp_avg());
  const auto mean = (m.value * beta1).add_(g.value, 1 - beta1);
  const auto direction = at::where(mean.isnan(), mean, mean.sign());
  p.value.mul_(1 - o.lr() * o.weight_decay()).sub_(direction, o.lr());
  m.value.mul_(beta2).add_(g.value, 1 - beta2);
  p.put(), m.put();
}

}  // namespace accelerate::optim
