#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace accelerate::parallel {

/// Elements [begin, begin + numel) of `value`, in the order in which `like`'s lie in memory: 1-D, and a view of `value`
/// where it lies as `like` does. `value` has the sizes of `like`.
at::Tensor stretch_of(const at::Tensor& like, const at::Tensor& value, int64_t begin, int64_t numel);

}  // namespace accelerate::parallel
