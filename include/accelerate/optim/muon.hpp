#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/optim/own_optimizer.hpp"
#include "accelerate/optim/steps_on_pieces.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::optim {

/// Of a group of matrices, or of one whose parameters Adam steps on; DeepSpeed's names and defaults.
struct ACCELERATE_API MuonOptions : torch::optim::OptimizerCloneableOptions<MuonOptions> {
  /// @param use_muon  the group has matrices for Muon: lr is 0.02, else 3e-4.
  explicit MuonOptions(bool use_muon = true) : use_muon_(use_muon), lr_(use_muon ? 0.02 : 3e-4) {}
  TORCH_ARG(bool, use_muon) = true;
  TORCH_ARG(double, lr) = 0.02;
  /// Decoupled: a step first multiplies the parameter by 1 - lr * weight_decay.
  TORCH_ARG(double, weight_decay) = 0;
  /// Muon's.
  TORCH_ARG(double, momentum) = 0.95;
  /// "gram" iterates on the small product of a matrix with itself, "standard" on the matrix, in bf16.
  TORCH_ARG(std::string, ns_method) = "gram";
  using betas_t = std::tuple<double, double>;
  /// Adam's, as the following.
  TORCH_ARG(betas_t, betas) = {0.9, 0.95};
  TORCH_ARG(double, eps) = 1e-10;
  /// false: weight_decay is added to gradients. Not part of a state.
  TORCH_ARG(bool, adam_w_mode) = true;

 public:
  double get_lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }
};

struct ACCELERATE_API MuonParamState : torch::optim::OptimizerCloneableParamState<MuonParamState> {
  TORCH_ARG(at::Tensor, momentum_buffer) = {};  ///< of matrices
  TORCH_ARG(int64_t, step) = 0;                 ///< of the rest
  TORCH_ARG(at::Tensor, exp_avg) = {};
  TORCH_ARG(at::Tensor, exp_avg_sq) = {};
};

/// Momentum whose update of a matrix is made nearly orthogonal by five Newton-Schulz iterations, and Adam for what is
/// no matrix: one optimizer for a whole model, as DeepSpeed's MuonWithAuxAdam. Convolutions' weights are matrices of
/// one row per output channel; of other tensors of more than two axes each matrix by itself. Parameters without a
/// gradient stay as they are (DeepSpeed takes it for zeros). Of a sharded model each rank holds the states of its
/// shards; ranks share out the updates of matrices, and each has one whole at a time. State dicts have DeepSpeed's
/// names.
class ACCELERATE_API Muon : public OwnOptimizer, public AsksOtherRanks {
 public:
  /// A group's MuonOptions are all its own; groups without any take `defaults`.
  /// @throws ConfigError for options out of range, and parameters of fewer than two axes in a group with use_muon.
  explicit Muon(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                const MuonOptions& defaults = MuonOptions());

 private:
  std::unique_ptr<torch::optim::OptimizerOptions> options_for(
      const torch::optim::OptimizerParamGroup& group) const override;
  void step_on_all() override;
  void step_on(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) override;
  at::Tensor momentum_of(const at::Tensor& parameter);
};

/// Groups for Muon as DeepSpeed makes them: parameters of two axes or more, but for those with "embed" or "lm_head" in
/// their names, and the rest. A group that would be empty is left out.
ACCELERATE_API std::vector<torch::optim::OptimizerParamGroup> muon_groups(
    const std::vector<std::pair<std::string, at::Tensor>>& named_parameters,
    const MuonOptions& matrices = MuonOptions(true), const MuonOptions& rest = MuonOptions(false));

}  // namespace accelerate::optim
