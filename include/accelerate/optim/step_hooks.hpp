#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "accelerate/optim/optimizer.hpp"

namespace accelerate {

/// For engines whose parameters are shared with other ranks; each may be left out.
struct AcceleratedOptimizer::StepHooks {
  /// Around each step that really happens.
  std::function<void()> before, after;
  /// After all of `before`: a scalar that gradients are divided by, besides their scale, in the pass of the step's
  /// kernels where it has some; else those of less precision than their parameters take the parameters' dtype first.
  std::function<at::Tensor()> divisor = nullptr;
  /// The groups may list other parameters than before.
  std::function<void()> look = nullptr;
  /// zero_grad() has cleared the gradient of a parameter.
  std::function<void(const at::Tensor&)> cleared = nullptr;
  /// Parameters to step on together: the step goes from part to part, and then to those in none. Null, or nothing:
  /// all at once. Around each part, with what the optimizer keeps of its parameters.
  std::function<std::vector<std::vector<at::Tensor>>()> parts = nullptr;
  std::function<void(size_t part, const std::vector<at::Tensor>&states)> before_part = nullptr, after_part = nullptr;
  /// For parts that step_ahead() steps on, one at a time, whose bytes may be elsewhere. All of them, or none: then it
  /// refuses parts.
  struct Ahead {
    /// Before it computes new values, with what the optimizer keeps of the part; false: it is not to.
    std::function<bool(size_t part, const std::vector<at::Tensor>& states)> before = nullptr;
    /// The new values are there: in memory that step_ahead() keeps, and in the very bytes of tensors that are
    /// elsewhere.
    std::function<void(size_t part, const std::vector<at::Tensor>& states)> after = nullptr;
    std::function<bool(const at::Tensor&)> elsewhere = nullptr;
    /// step() would compute the same, as far as it can see: tensors that are elsewhere take their new values, and this
    /// is true, unless somebody may have touched them.
    std::function<bool(size_t part, bool divides_gradients)> take = nullptr;
    /// All others have taken theirs.
    std::function<void(size_t part)> taken = nullptr;
  };
  Ahead ahead = {};
};

}  // namespace accelerate
