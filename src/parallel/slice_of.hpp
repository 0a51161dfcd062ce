#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "accelerate/parallel/held.hpp"

namespace accelerate::parallel {

/// Elements [begin, begin + numel) of `value`, in the order in which `like`'s lie in memory: 1-D, and a view of `value`
/// where it lies as `like` does. `value` has the sizes of `like`.
at::Tensor slice_of(const at::Tensor& like, const at::Tensor& value, int64_t begin, int64_t numel);

/// A tensor that lies as the slice's box does in the order of the whole's memory; without bytes unless the box is the
/// whole.
at::Tensor box_like(const at::Tensor& whole, const Slice& slice);

}  // namespace accelerate::parallel
