#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

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

/// The tensors that a step reads and writes. Lists as above.
struct StepLists {
  at::TensorList parameters, gradients, first, second = {}, largest = {};
  std::vector<StepSlice> slices() const;
};
/// kernels::step_ahead() of lists whose bytes are here. @param fresh  as many, for new values; no gradients
template <class Rule>
std::vector<StepDigest> step_ahead(const Rule& rule, const StepLists& lists, const StepLists& fresh, double divisor) {
  std::vector<SliceAhead> ahead;
  for (const StepSlice& slice : fresh.slices())
    ahead.push_back({slice.parameter, slice.first, slice.second, slice.largest});
  return step_ahead(rule, lists.slices(), ahead, divisor);
}

}  // namespace accelerate::optim::kernels
