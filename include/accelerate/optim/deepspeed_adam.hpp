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

/// Names and defaults of DeepSpeed's FusedAdam and DeepSpeedCPUAdam. (amsgrad, which both refuse, has torch::optim's
/// classes.)
struct ACCELERATE_API DeepSpeedAdamOptions : torch::optim::OptimizerCloneableOptions<DeepSpeedAdamOptions> {
  explicit DeepSpeedAdamOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-3;
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(betas_t, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  /// Decoupled weight decay, AdamW's; false: it is added to gradients, as Adam does.
  TORCH_ARG(bool, adam_w_mode) = true;
  /// Moments are divided by 1 - beta to the power of the steps taken.
  TORCH_ARG(bool, bias_correction) = true;
  /// Moments are fp32 also for parameters in 16 bits. false: of the parameter's type.
  TORCH_ARG(bool, fp32_optimizer_states) = true;

 public:
  double get_lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }
};

struct ACCELERATE_API DeepSpeedAdamParamState : torch::optim::OptimizerCloneableParamState<DeepSpeedAdamParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg) = {};
  TORCH_ARG(at::Tensor, exp_avg_sq) = {};
};

/// Adam and AdamW with what DeepSpeed's have and LibTorch's don't. Each step is computed in fp32 (fp64 for fp64) and
/// rounded once, also where parameters, and states, have 16 bits. State dicts have DeepSpeed's names. A fused step on
/// CPUs.
class ACCELERATE_API DeepSpeedAdam : public OwnOptimizer, public ElementWise {
 public:
  /// @throws ConfigError for options out of range.
  explicit DeepSpeedAdam(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                         const DeepSpeedAdamOptions& defaults = DeepSpeedAdamOptions());
  explicit DeepSpeedAdam(std::vector<at::Tensor> params, const DeepSpeedAdamOptions& defaults = DeepSpeedAdamOptions())
      : DeepSpeedAdam({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

 private:
  std::unique_ptr<torch::optim::OptimizerOptions> options_for(
      const torch::optim::OptimizerParamGroup& group) const override;
  void step_on(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) override;
};

}  // namespace accelerate::optim
