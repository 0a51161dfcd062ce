#pragma once

#include <ATen/core/Tensor.h>

namespace accelerate::codes::kernels {

/// Memory for what products read whole: side by side in pages of 2 MB, where the system has them, because with pages of
/// 4 KB a virtual machine looks up addresses for longer than it reads. What a tensor had is given back when it ends.
at::Tensor empty_in_huge_pages(at::IntArrayRef sizes, at::ScalarType dtype);

}  // namespace accelerate::codes::kernels
