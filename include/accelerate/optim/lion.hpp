#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/optim/element_wise.hpp"
#include "accelerate/optim/own_optimizer.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::optim {

/// DeepSpeed's defaults.
struct ACCELERATE_API LionOptions : torch::optim::OptimizerCloneableOptions<LionOptions> {
  explicit LionOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-3;
  using betas_t = std::tuple<double, double>;
  /// Of the mean that says the direction, and of the momentum that is kept.
  TORCH_ARG(betas_t, betas) = {0.9, 0.999};
  /// Decoupled: a step first multiplies the parameter by 1 - lr * weight_decay.
  TORCH_ARG(double, weight_decay) = 0;

 public:
  double get_lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }
};

struct ACCELERATE_API LionParamState : torch::optim::OptimizerCloneableParamState<LionParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg) = {};  ///< in the parameter's type
};

/// Steps by lr in the direction of the sign of a mean of gradients (arXiv:2302.06675). An element whose mean is zero
/// stays where it is, as in the paper; DeepSpeed's kernels move it by lr. State dicts have DeepSpeed's names. A fused
/// step on CPUs (AcceleratedOptimizerOptions::fused).
class ACCELERATE_API Lion : public OwnOptimizer, public ElementWise {
 public:
  /// @throws ConfigError for options out of range.
  explicit Lion(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                const LionOptions& defaults = LionOptions());
  explicit Lion(std::vector<at::Tensor> params, const LionOptions& defaults = LionOptions())
      : Lion({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

 private:
  std::unique_ptr<torch::optim::OptimizerOptions> options_for(
      const torch::optim::OptimizerParamGroup& group) const override;
  void step_on(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) override;
};

}  // namespace accelerate::optim
