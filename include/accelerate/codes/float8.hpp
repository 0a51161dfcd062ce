#pragma once

/// Numbers in 8 bits: E4M3 ("fn": no infinity, largest 448) and E5M2 (largest 57344), and scales that bring tensors
/// into their range. Codes are ordinary tensors of LibTorch's kFloat8_e4m3fn and kFloat8_e5m2; scales are fp32 and say
/// what values are *multiplied* by before they are rounded: value = code / scale.
///
/// Casts saturate: what lies beyond the largest number becomes it, infinities too; NaN stays NaN. Ties go to even.
/// (LibTorch's own conversion makes NaN (E4M3) or infinity (E5M2) of what is too large; within the range both agree to
/// the bit.) May be called from any thread; CPU tensors take own loops, others LibTorch's operators.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "accelerate/utils/export.hpp"

namespace accelerate::codes {

enum class Float8 : uint8_t { e4m3, e5m2 };

/// kFloat8_e4m3fn or kFloat8_e5m2.
ACCELERATE_API at::ScalarType scalar_type(Float8 format);
/// 448 or 57344.
ACCELERATE_API float largest(Float8 format);

/// max |x| over all elements, NaN if there is one, 0 where x is empty: fp32 scalar on x's device. @param x floating.
ACCELERATE_API at::Tensor amax(const at::Tensor& x);
/// max |x| along `dim`, which stays with size 1: fp32.
ACCELERATE_API at::Tensor amax(const at::Tensor& x, int64_t dim);

/// largest(format) / amax of a tensor that is scaled by what is in it now (torchao's rule): amax counts as at least
/// 1e-12. @param power_of_two  round down to a power of two (exact to multiply with)
ACCELERATE_API at::Tensor scale_of(const at::Tensor& amax, Float8 format, bool power_of_two = false);

/// Codes of x * scale, of x's shape and contiguous. @param scale  fp32, one element, or broadcastable to x (rows).
ACCELERATE_API at::Tensor encode(const at::Tensor& x, const at::Tensor& scale, Float8 format);
/// codes / scale in `dtype` (fp32, bf16, fp16). @param scale  as in encode(); undefined: 1, the codes' own values.
ACCELERATE_API at::Tensor decode(const at::Tensor& codes, const at::Tensor& scale, at::ScalarType dtype);

/// MXFP8: blocks of 32 along the last dimension share a scale that is a power of two.
struct MxCodes {
  at::Tensor codes;      ///< of x's shape
  at::Tensor exponents;  ///< uint8 [..., ceil(last / 32)]: E8M0, value = code * 2^(exponent - 127); 255 is NaN
};
/// Rounds exponents up (no element saturates), as Transformer Engine does. @param x  floating, at least one dimension.
ACCELERATE_API MxCodes encode_mx(const at::Tensor& x, Float8 format);
ACCELERATE_API at::Tensor decode_mx(const MxCodes& codes, at::ScalarType dtype);

}  // namespace accelerate::codes
