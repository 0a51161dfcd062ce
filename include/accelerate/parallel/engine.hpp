#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate::parallel {

/// How ranks train one model together, as the facade drives it. All members are collective unless they say
/// otherwise.
class ACCELERATE_API Engine {
 public:
  virtual ~Engine() = default;

  virtual void before_forward() = 0;
  /// `outputs`: the tensors of the model's result.
  virtual void after_forward(const std::vector<at::Tensor>& outputs) = 0;
  /// The forward is over, also when it threw; after_forward() may have come before. Not collective.
  virtual void leave_forward() noexcept {}
  /// Right after a backward that may have gone through the model.
  virtual void after_backward() {}

  /// Whether backward averages gradients over ranks. Off: they only accumulate locally. Not collective.
  virtual bool require_backward_grad_sync() const = 0;
  virtual void set_require_backward_grad_sync(bool value) = 0;
  /// After forwards without synchronisation: makes the next backward synchronise all the same. Not collective.
  virtual void prepare_backward_sync() = 0;
};

}  // namespace accelerate::parallel
