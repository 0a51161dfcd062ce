#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
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
  /// The step is over, of which run() may have taken several parts: what was computed ahead and not taken is worth
  /// nothing any more.
  virtual void end_step() = 0;

  // A step that is computed before it is taken, beside the old values.

  using Parameters = std::unordered_set<const at::TensorImpl*>;
  /// Whether a tensor's bytes are elsewhere, and only brought for a while: nobody reads them to see whether they have
  /// changed, and new values are computed in their place, which others put beside the old ones. Null: none.
  using Elsewhere = std::function<bool(const at::Tensor&)>;
  /// Collects those of its parameters that are among these and have gradients and states (if any are needed).
  /// @return null, or why it can't
  virtual const char* prepare_ahead(const Parameters& which) = 0;
  /// Whether that is anything, and worth a try.
  virtual bool has_ahead() const = 0;
  /// Computes the coming step on them; run() takes over what it would compute the same, of parameters of which nothing
  /// is elsewhere. @param divisor  of gradients, as far as it is known
  virtual void compute_ahead(double divisor, const Elsewhere& elsewhere) = 0;
  /// After prepare(): whether the step was computed ahead of exactly these, and would be the same now as far as
  /// tensors, their versions and options tell, and the bytes of those that are not elsewhere.
  virtual bool fits_ahead(const Parameters& these, const std::optional<at::Tensor>& grad_scale,
                          const Elsewhere& elsewhere) = 0;
  /// Takes the step of which that is so; others have given what is elsewhere its new bytes.
  virtual void take_ahead(const std::optional<at::Tensor>& grad_scale) = 0;
};

}  // namespace accelerate::optim
