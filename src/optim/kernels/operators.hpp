#pragma once

#include <ATen/core/Tensor.h>

#include "optim/kernels/step.hpp"

namespace accelerate::optim::kernels {

/// step() on whole tensors, by operators, so that what is elsewhere comes and homes hear of the writes. Lists are of
/// one length, or empty where the rule has no such state; tensors are dense, on the host, and those of one place have
/// the same strides. Versions of tensors are the caller's to bump.
void step_(const AdamStep& rule, at::TensorList parameters, at::TensorList gradients, at::TensorList first,
           at::TensorList second, at::TensorList largest, double divisor);
void step_(const SgdStep& rule, at::TensorList parameters, at::TensorList gradients, at::TensorList momentum,
           double divisor);
void step_(const AdagradStep& rule, at::TensorList parameters, at::TensorList gradients, at::TensorList sums,
           double divisor);
void step_(const LionStep& rule, at::TensorList parameters, at::TensorList gradients, at::TensorList momentum,
           double divisor);

}  // namespace accelerate::optim::kernels
