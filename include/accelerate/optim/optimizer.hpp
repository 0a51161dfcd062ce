#pragma once

/// An optimizer that knows about gradient accumulation, loss scaling and fused kernels.

#include <torch/optim/optimizer.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

namespace optim {
class GradScaler;
}

struct AcceleratedOptimizerOptions {
  /// One kernel per step instead of about ten per tensor (Adam, AdamW, SGD, and on CPUs Adagrad, optim::Lion and
  /// optim::DeepSpeedAdam; dense parameters): our own on CPUs, ATen's on GPUs. It reads and writes the same state
  /// objects, so one may switch at any time. Unset: where the result is the plain step's but for rounding, i.e. fp32
  /// and fp64; in fp16 and bf16 the plain step rounds after every operation and the kernel only once. true: also fp16
  /// and bf16, and a ConfigError where it is impossible. false: never.
  std::optional<bool> fused;
};

/// Cheap-to-copy handle on a torch::optim::Optimizer; copies share it. Does nothing in `step` and `zero_grad` while
/// gradients accumulate (GradientState::sync_gradients() is false). A parameter that a group lists several times (tied
/// weights) is kept once, as in Python. Not thread-safe. Source: features table 1.5.
class ACCELERATE_API AcceleratedOptimizer {
 public:
  /// By reference: the caller keeps the optimizer alive.
  /// @param device_placement  move state that exists already to PartialState's device.
  /// @param scaler            loss scaling; may be null.
  explicit AcceleratedOptimizer(torch::optim::Optimizer& optimizer, bool device_placement = true,
                                std::shared_ptr<optim::GradScaler> scaler = nullptr,
                                const AcceleratedOptimizerOptions& options = {});
  /// Shared ownership; a unique_ptr's moves here.
  explicit AcceleratedOptimizer(std::shared_ptr<torch::optim::Optimizer> optimizer, bool device_placement = true,
                                std::shared_ptr<optim::GradScaler> scaler = nullptr,
                                const AcceleratedOptimizerOptions& options = {});
  /// A temporary: it is moved here.
  template <std::derived_from<torch::optim::Optimizer> T>
  requires(!std::is_abstract_v<T>) explicit AcceleratedOptimizer(T&& optimizer, bool device_placement = true,
                                                                 std::shared_ptr<optim::GradScaler> scaler = nullptr,
                                                                 const AcceleratedOptimizerOptions& options = {})
      : AcceleratedOptimizer(std::make_shared<T>(std::move(optimizer)), device_placement, std::move(scaler), options) {}

  using LossClosure = std::function<at::Tensor()>;
  /// One optimizer step; none while accumulating. With a scaler it is collective (see GradScaler) and may be skipped.
  /// @param closure  computes the loss again (LBFGS); not together with a scaler. Of an optimizer that may call it
  ///                 several times (LBFGS, and classes that this library does not know) it is collective: the optimizer
  ///                 sees the mean of the ranks' losses, so that all ranks call it equally often.
  /// @return the closure's loss (the mean, where there is one), else an undefined tensor.
  at::Tensor step(const LossClosure& closure = nullptr) const;
  void zero_grad(bool set_to_none = true) const;  ///< drops (or zeroes) the gradients; nothing while accumulating
  bool step_was_skipped() const;                  ///< the last step changed nothing because a gradient overflowed
  bool step_was_fused() const;                    ///< the last step ran on the fused kernels
  /// So far, also before the checkpoint that this run goes on from, if that tells.
  struct StepCounts {
    int64_t taken = 0, skipped = 0;
  };
  StepCounts step_counts() const;
  void set_step_counts(const StepCounts& counts) const;
  /// For engines whose parameters are shared with other ranks, see optim/step_hooks.hpp. Each owner's latest set holds.
  struct StepHooks;
  void set_step_hooks(const void* owner, StepHooks hooks) const;
  /// Steps on those of its parameters that are among these and have gradients, now, without hooks, and clears these
  /// gradients; nothing while they accumulate. @throws ConfigError with a scaler, or if it needs all at once
  void step_on(const std::vector<at::Tensor>& parameters) const;
  /// Computes, of the step that comes next, new values of those of its parameters that are among these and have
  /// gradients. They lie beside the old ones: nothing that a program can look at changes. step() takes over what it
  /// would compute to the bit (parameters, gradients after all that was done to them, states and options are still the
  /// same), and computes the rest. Nothing while gradients accumulate, nor in a parameter's first step. Not collective.
  /// @throws ConfigError where it has any of these and they have no such step: other classes than Adam, AdamW, SGD,
  /// Adagrad, optim::Lion and optim::DeepSpeedAdam, fused = false, 16 bits without fused = true, on an accelerator.
  void step_ahead(const std::vector<at::Tensor>& parameters) const;
  torch::optim::Optimizer& optimizer() const;
  operator torch::optim::Optimizer&() const { return optimizer(); }
  std::vector<torch::optim::OptimizerParamGroup>& param_groups() const { return optimizer().param_groups(); }
  auto& state() const { return optimizer().state(); }
  torch::optim::OptimizerOptions& defaults() const { return optimizer().defaults(); }
  /// With the options that the group has, also of optimizers that LibTorch does not know.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) const;
  const std::shared_ptr<optim::GradScaler>& scaler() const;
  /// Python's layout: {'state': {0: {'step': …, 'exp_avg': …}}, 'param_groups': [{'lr': …, 'params': [0, 1]}]}. Tensors
  /// are shared with the optimizer.
  /// @throws ConfigError for classes other than SGD, Adam, AdamW, Adagrad, RMSprop, those of this library, and those
  /// that are an optim::OwnStateDict (also for LBFGS, whose history has no common form).
  c10::IValue state_dict() const;
  /// Takes over such a dict, written here or by Python, for the same parameters in the same order. Tensors are copied
  /// to the parameters' devices.
  /// @throws CheckpointError when groups, counts or shapes differ or an option has no counterpart here (maximize);
  /// nothing is changed then.
  void load_state_dict(const c10::IValue& state) const;
  friend bool operator==(const AcceleratedOptimizer& a, const AcceleratedOptimizer& b) { return a.impl_ == b.impl_; }

 private:
  void look() const;
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace accelerate
