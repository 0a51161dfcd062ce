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
  bool operator==(const AdamStep&) const = default;
};
struct SgdStep {
  double lr, momentum, dampening, weight_decay;
  bool nesterov;
  bool first;  ///< the momentum buffer has nothing yet
  bool operator==(const SgdStep&) const = default;
};
struct AdagradStep {
  double lr, lr_decay, eps, weight_decay;
  int64_t step;  ///< the number of this one, from 1
  bool operator==(const AdagradStep&) const = default;
};
/// "Symbolic Discovery of Optimization Algorithms" (Chen and others, 2023).
struct LionStep {
  double lr, beta1, beta2, weight_decay;
  bool operator==(const LionStep&) const = default;
};

/// Steps on all of them, on LibTorch's threads. Blocks. An element's new bits depend on its old ones and the rule only:
/// not on how a tensor is cut into slices, on threads, or on the processor's instructions.
/// @param divisor  of gradients: a loss's scale. They are left divided.
void step(const AdamStep& rule, const std::vector<StepSlice>& slices, double divisor = 1);
void step(const SgdStep& rule, const std::vector<StepSlice>& slices, double divisor = 1);
void step(const AdagradStep& rule, const std::vector<StepSlice>& slices, double divisor = 1);
void step(const LionStep& rule, const std::vector<StepSlice>& slices, double divisor = 1);

/// Where new values of a slice go that stays as it is; of its count and types.
struct SliceAhead {
  void *parameter = nullptr, *first = nullptr, *second = nullptr, *largest = nullptr;
};
/// A number for the parameters that a step reads, and one for its gradients, divided. One changed element changes it
/// for certain; of many that change at once, one case in billions does not.
struct StepDigest {
  uint64_t parameter = 0, gradient = 0;
  bool operator==(const StepDigest&) const = default;
};
/// The bits that step() would leave, elsewhere; gradients are not left divided. Threads and all else as there.
/// @param ahead  as many as slices
/// @return of each slice, what was read
std::vector<StepDigest> step_ahead(const AdamStep& rule, const std::vector<StepSlice>& slices,
                                   const std::vector<SliceAhead>& ahead, double divisor = 1);
std::vector<StepDigest> step_ahead(const SgdStep& rule, const std::vector<StepSlice>& slices,
                                   const std::vector<SliceAhead>& ahead, double divisor = 1);
std::vector<StepDigest> step_ahead(const AdagradStep& rule, const std::vector<StepSlice>& slices,
                                   const std::vector<SliceAhead>& ahead, double divisor = 1);
std::vector<StepDigest> step_ahead(const LionStep& rule, const std::vector<StepSlice>& slices,
                                   const std::vector<SliceAhead>& ahead, double divisor = 1);
/// The same numbers of what slices are now: equal ones say that step() would read what step_ahead() has read.
std::vector<StepDigest> digests(const std::vector<StepSlice>& slices, double divisor = 1);
/// Leaves gradients as step() leaves them.
void divide_gradients(const std::vector<StepSlice>& slices, double divisor);

}  // namespace accelerate::optim::kernels
