#pragma once

#include "accelerate/codes/codes.hpp"

namespace accelerate::codes {

/// decode_rows() by LibTorch's operators, on the device where the codes are; on the CPU the same numbers to the bit.
/// Takes some ten times the memory of the result meanwhile: few rows at a time.
/// @param codes  checked. @return [count, columns] of `dtype`
at::Tensor decode_by_operators(const Codes& codes, int64_t first, int64_t count, at::ScalarType dtype);

/// Rows of a table, fp32 [indices, columns]. @param indices  [n], int64 or int32, within the table
at::Tensor rows_by_operators(const Codes& codes, const at::Tensor& indices);

/// plain_scales() in the same way, of nf4 and fp4.
at::Tensor scales_by_operators(const Codes& codes);

}  // namespace accelerate::codes
