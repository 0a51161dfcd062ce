#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <optional>
#include <unordered_set>

namespace accelerate::optim {

/// The step of Adam, AdamW, SGD, Adagrad, Lion or DeepSpeedAdam on fused kernels, ours on CPUs and ATen's on GPUs,
/// reading and writing the same state objects as the optimizer's own step. The lists of tensors that the kernels take
/// are kept between steps and built anew only when parameters, state or the set of gradients change.
class FusedStep {
 public:
  /// Null when the class has no fused kernel. Exact classes only: a derived class may step otherwise.
  /// @param allow_half  also fp16 and bf16.
  static std::unique_ptr<FusedStep> create(torch::optim::Optimizer& optimizer, bool allow_half);
  virtual ~FusedStep() = default;

  /// Collects the gradients. @return null when `run` can take the step, else why not (nothing has changed then).
  virtual const char* prepare() = 0;
  /// Takes the step that was prepared. @param grad_scale fp32 scalar that gradients are divided by first; it is brought
  /// to the parameters, which may be on the host while losses are on a GPU.
  virtual void run(const std::optional<at::Tensor>& grad_scale) = 0;
  /// Lets go of the gradients that were prepared when the step is not taken.
  virtual void discard() = 0;
  /// Computes the coming step on those of its parameters that are among these and have gradients and states (if any
  /// are needed), beside the old values; run() takes over what it would compute the same.
  /// @param divisor  of gradients, as far as it is known
  /// @return null, or why it can't (nothing has changed then)
  virtual const char* compute_ahead(const std::unordered_set<const at::TensorImpl*>& which, double divisor) = 0;
};

}  // namespace accelerate::optim
