#include "accelerate/optim/deepspeed_adam.hpp"

#include <ATen/ops/zeros_like.h>

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
  const auto [beta1, beta2] = o.betas();
  adam_step_on(parameter, state,
               {.lr = o.lr(),
                .beta1 = beta1,
                .beta2 = beta2,
                .eps = o.eps(),
                .weight_decay = o.weight_decay(),
                .decoupled = o.adam_w_mode(),
                .bias_correction = o.bias_correction()});
}

}  // namespace accelerate::optim
