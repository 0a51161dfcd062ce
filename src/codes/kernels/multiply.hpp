#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "codes/kernels/packed.hpp"
#include "codes/kernels/product.hpp"

namespace accelerate::codes::kernels {

/// Those that this processor has, the fastest first; the plain one is always there.
const std::vector<const InstructionSet*>& instruction_sets();

/// The fastest that ATEN_CPU_CAPABILITY, which is LibTorch's own setting, allows.
const InstructionSet& instruction_set();

/// x w^T with inputs rounded to signed bytes, in parts of 32 with a scale each. A row of x with a NaN or an infinite
/// number becomes NaN.
/// @param x  [.., K] fp32, contiguous. @return [.., N] fp32
at::Tensor multiply(const InstructionSet& instructions, const at::Tensor& x, const Packed& packed);

}  // namespace accelerate::codes::kernels
