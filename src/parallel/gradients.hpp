#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <unordered_set>
#include <vector>

#include "accelerate/parallel/engine.hpp"

namespace accelerate::parallel {

/// The gradients of some parameters, as this rank holds them; parameters without one are left out.
struct Gradients {
  std::vector<at::Tensor> whole;    ///< the same on all ranks
  std::vector<at::Tensor> pieces;   ///< of parameters that ranks hold in shards
  std::vector<at::Tensor> counted;  ///< of `shards`: those that count here; others are another rank's too

  /// Multiplies all of them in place; `factor` is a number or a scalar tensor.
  void scale(const at::Scalar& factor) const;
  void scale(const at::Tensor& factor) const;
  /// f changes some of them after the other, in place.
  void change(const std::function<void(const std::vector<at::Tensor>& some)>& f) const;
};

/// Tensors that no engine knows count as parameters that are whole everywhere. A tensor that is listed several times
/// (LibTorch lists a tied weight under each name, and two models may share modules) is there once. Not collective.
Gradients gradients_of(const Engines& engines, const std::vector<at::Tensor>& parameters);

/// The tensors that optimizers step on for these parameters: themselves, or this rank's shards of them. Not collective.
std::unordered_set<const at::TensorImpl*> stepped_for(const Engines& engines,
                                                      const std::vector<at::Tensor>& parameters);

/// The norm of all gradients together, as if each were whole; a scalar, in fp32 at least where shards count. Collective
/// if any engine's ranks hold different shards. @param device  this rank's.
at::Tensor norm_of(const Gradients& gradients, const Engines& engines, double norm_type, const at::Device& device);

}  // namespace accelerate::parallel
