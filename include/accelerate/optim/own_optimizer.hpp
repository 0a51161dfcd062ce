#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate::optim {

/// The base of optimizers that LibTorch does not know: parameter groups with options of their own class, a step's
/// closure, and states that AcceleratedOptimizer writes in Python's layout (as torch::optim's).
class ACCELERATE_API OwnOptimizer : public torch::optim::Optimizer {
 public:
  /// Takes the place of Optimizer's, which knows the options of LibTorch's classes only. Options of the group act where
  /// they differ from what a fresh object of their class has; the rest is the optimizer's.
  /// @throws ConfigError for options out of range or of another class, or parameters that it can't step on; nothing is
  /// added then.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// @throws ConfigError for a sparse gradient, before anything is changed.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// torch::save and torch::load of LibTorch, which have no layout for it: a ConfigError says what to use.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  /// @param name  of the class, for messages
  OwnOptimizer(const char* name, std::unique_ptr<torch::optim::OptimizerOptions> defaults);
  /// Calls add_param_group with each; for constructors.
  void add_param_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups);
  const char* name() const { return name_; }

 private:
  /// A group's options, completed by the optimizer's. @throws ConfigError as add_param_group
  virtual std::unique_ptr<torch::optim::OptimizerOptions> options_for(
      const torch::optim::OptimizerParamGroup& group) const = 0;
  /// Steps on all that have gradients; one after the other. Without graphs.
  virtual void step_on_all();
  /// Steps on one that has a gradient, by operators. Without graphs.
  virtual void step_on(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) = 0;

  const char* name_;
};

}  // namespace accelerate::optim
