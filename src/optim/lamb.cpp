#include "accelerate/optim/lamb.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "optim/describe_own.hpp"
#include "optim/own_step.hpp"

namespace accelerate::optim {

Lamb::Lamb(const std::vector<torch::optim::OptimizerParamGroup>& groups, const LambOptions& defaults)
    : OwnOptimizer(DescribeLamb::kName, std::make_unique<LambOptions>(defaults)) {
  add_param_groups(groups);
}

std::unique_ptr<torch::optim::OptimizerOptions> Lamb::options_for(
    const torch::optim::OptimizerParamGroup& group) const {
  return options_of_own<DescribeLamb>(group, defaults());
}

void Lamb::step_on(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) {
  const auto& o = static_cast<const LambOptions&>(options);
  auto& state = state_at<LambParamState>(*this, parameter, [&](auto& made) {
    made.exp_avg(at::zeros_like(parameter)).exp_avg_sq(at::zeros_like(parameter));
  });
  state.step(state.step() + 1);
  const auto [beta1, beta2] = o.betas();
  const auto step = static_cast<double>(state.step());
  // FusedLamb corrects the rate only: eps is added to a second moment that still grows.
  const double rate =
      o.bias_correction() ? o.lr() * std::sqrt(1 - std::pow(beta2, step)) / (1 - std::pow(beta1, step)) : o.lr();
  const Wide p(parameter), g(parameter.grad()), m(state.exp_avg()), v(state.exp_avg_sq());
  m.value.mul_(beta1).add_(g.value, 1 - beta1);
  v.value.mul_(beta2).addcmul_(g.value, g.value, 1 - beta2);
  const auto divisor = o.eps_inside_sqrt() ? v.value.add(o.eps()).sqrt_() : v.value.sqrt().add_(o.eps());
  const auto update = m.value.div(divisor).add_(p.value, o.weight_decay());
  at::Tensor length = at::linalg_vector_norm(p.value), of_update = at::linalg_vector_norm(update);
  if (const auto* pieces = pieces_of(parameter)) {
    const at::Tensor norms = pieces->summed(parameter, at::stack({length, of_update}).square_()).sqrt_();
    length = norms[0], of_update = norms[1];
  }
  const auto ratio = (length / of_update).clamp_(o.min_coeff(), o.max_coeff());
  const auto trust =
      at::where((length == 0).logical_or_(of_update == 0), at::Scalar(1.0), ratio).to(ratio.scalar_type());
  p.value.sub_(update.mul_(trust), rate);
  p.put(), m.put(), v.put();
}

}  // namespace accelerate::optim
