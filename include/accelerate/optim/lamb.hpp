#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/optim/own_optimizer.hpp"
#include "accelerate/optim/steps_on_pieces.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::optim {

/// Names and defaults of DeepSpeed's FusedLamb.
struct ACCELERATE_API LambOptions : torch::optim::OptimizerCloneableOptions<LambOptions> {
  explicit LambOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-3;
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(betas_t, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  /// eps is added to the second moment and not to its root.
  TORCH_ARG(bool, eps_inside_sqrt) = false;
  /// Part of the update, and so of its norm.
  TORCH_ARG(double, weight_decay) = 0;
  /// The rate makes up for the moments' first steps.
  TORCH_ARG(bool, bias_correction) = true;
  /// Bounds of the ratio of a parameter's norm to its update's.
  TORCH_ARG(double, max_coeff) = 10;
  TORCH_ARG(double, min_coeff) = 0.01;

 public:
  double get_lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }
};

struct ACCELERATE_API LambParamState : torch::optim::OptimizerCloneableParamState<LambParamState> {
  TORCH_ARG(int64_t, step) = 0;
  TORCH_ARG(at::Tensor, exp_avg) = {};
  TORCH_ARG(at::Tensor, exp_avg_sq) = {};
};

/// Adam whose update of a parameter is as long as the parameter, times lr (arXiv:1904.00962), as DeepSpeed's FusedLamb
/// computes it: parameter -= rate * clamp(|parameter| / |update|) * update, where a norm of zero makes the ratio 1. Of
/// a sharded model each rank holds the states of its shards; ranks add up the squares of both norms. State dicts have
/// DeepSpeed's names.
class ACCELERATE_API Lamb : public OwnOptimizer, public AsksOtherRanks {
 public:
  /// @throws ConfigError for options out of range.
  explicit Lamb(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                const LambOptions& defaults = LambOptions());
  explicit Lamb(std::vector<at::Tensor> params, const LambOptions& defaults = LambOptions())
      : Lamb({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

 private:
  std::unique_ptr<torch::optim::OptimizerOptions> options_for(
      const torch::optim::OptimizerParamGroup& group) const override;
  void step_on(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) override;
};

}  // namespace accelerate::optim
