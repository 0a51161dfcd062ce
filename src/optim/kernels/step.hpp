#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace accelerate::optim::kernels {

/// A part of a parameter, in the order of its bytes, with all that a step on it reads and writes. On the host; parts
/// don't overlap. Types are fp32, bf16 or fp16, which are computed with in fp32, or all three are fp64.
struct StepSlice {
  int64_t count = 0;  ///< elements
  at::ScalarType parameter_type = at::kFloat, gradient_type = at::kFloat, state_type = at::kFloat;
  void* parameter = nullptr;
  void* gradient = nullptr;  ///< changed only where gradients are divided
  /// Adam: both moments, and the largest second one of AMSGrad; SGD and Lion: the momentum; Adagrad: the sum.
  void *first = nullptr, *second = nullptr, *largest = nullptr;
};

/// "Decoupled Weight Decay Regularization" (Loshchilov and Hutter, 2019) if `decoupled`, else Adam with L2.
struct AdamStep {
  double lr, beta1, beta2, eps, weight_decay;
  bool decoupled;
  int64_t step;                 ///< the number of this one, from 1
  bool bias_correction = true;  ///< makes up for the first steps
};
struct SgdStep {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
  bool first;  ///< the momentum buffer has nothing yet
};
struct AdagradStep {
  double lr, lr_decay, eps, weight_decay;
  int64_t step;  ///< the number of this one, from 1
};
/// "Symbolic Discovery of Optimization Algorithms" (Chen and others, 2023).
struct LionStep {
  double lr, beta1, beta2, weight_decay;
};

/// Steps on all of them, on LibTorch's threads. Blocks. An element's new bits depend on its old ones and the rule only:
/// not on how a tensor is cut into slices, on threads, or on the processor's instructions.
/// @param divisor  of gradients: a loss's scale. They are left divided.
void step(const AdamStep& rule, const std::vector<StepSlice>& slices, double divisor = 1);
void step(const SgdStep& rule, const std::vector<StepSlice>& slices, double divisor = 1);
void step(const AdagradStep& rule, const std::vector<StepSlice>& slices, double divisor = 1);
void step(const LionStep& rule, const std::vector<StepSlice>& slices, double divisor = 1);

}  // namespace accelerate::optim::kernels
