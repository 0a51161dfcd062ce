#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "accelerate/codes/codes.hpp"

namespace accelerate::codes {

/// x w^T + bias as LLM.int8() has it: x is rounded to fp16 and then to codes of 8 bits with a scale per row, products
/// are of whole numbers; columns of x in which an element reaches `threshold` are left out of that and multiplied with
/// the decoded weight. On CPUs as bitsandbytes 0.50 does it.
/// @param x  [.., K] of any floating-point dtype. @param w  int8_rowwise, [N, K]
/// @param threshold  0: no columns are treated apart
/// @return  [.., N] of x's dtype. @throws as kernels::check_product(). Source: LLM.int8(), arXiv:2208.07339
at::Tensor llm_int8_linear(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias,
                           double threshold);

}  // namespace accelerate::codes
