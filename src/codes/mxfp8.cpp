/// MXFP8: a power of two for each 32 values.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "accelerate/codes/float8.hpp"
#include "utils/raise.hpp"

namespace accelerate::codes {
namespace {

constexpr int64_t kMxBlock = 32;

at::Tensor in_blocks(const at::Tensor& x) {
  const int64_t last = x.size(-1), padded = (last + kMxBlock - 1) / kMxBlock * kMxBlock;
  at::Tensor whole = padded == last ? x.contiguous() : at::constant_pad_nd(x, {0, padded - last});
  std::vector<int64_t> sizes = whole.sizes().vec();
  sizes.back() = padded / kMxBlock;
  sizes.push_back(kMxBlock);
  return whole.view(sizes);
}

at::Tensor out_of_blocks(const at::Tensor& blocks, at::IntArrayRef sizes) {
  std::vector<int64_t> padded = sizes.vec();
  padded.back() = blocks.size(-2) * kMxBlock;
  return blocks.view(padded).narrow(-1, 0, sizes.back()).contiguous();
}

/// The exponent of amax / largest, rounded up. As in Transformer Engine the quotient is a product with the
/// reciprocal in fp32.
at::Tensor exponents_of(const at::Tensor& amax, Float8 format) {
  const at::Tensor quotient = amax.mul(1.0f / largest(format)).contiguous();
  const at::Tensor bits = quotient.view(at::kInt);
  const at::Tensor exponent = bits.bitwise_right_shift(23), mantissa = bits.bitwise_and(0x7fffff);
  // A value below 2^-127 already has the least exponent; the greatest stays.
  const at::Tensor up = mantissa.gt(0)
                            .logical_and_(exponent.ne(0xfe))
                            .logical_and_(exponent.eq(0).logical_and_(mantissa.le(0x400000)).logical_not_());
  const at::Tensor rounded = exponent.add(up);
  const at::Tensor special = at::where(quotient.isnan(), 0xff, at::where(quotient.isinf(), 0xfe, rounded));
  return special.to(at::kByte);
}

/// 2^(sign * (exponent - 127)), NaN for 255.
at::Tensor powers(const at::Tensor& exponents, int sign) {
  std::array<float, 256> table{};
  for (int i = 0; i < 255; ++i) table[static_cast<size_t>(i)] = std::ldexp(1.0f, sign * (i - 127));
  table[255] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor all = at::tensor(at::ArrayRef<float>(table.data(), table.size()), at::kFloat);
  return all.to(exponents.device()).index_select(0, exponents.reshape({-1}).to(at::kInt)).view_as(exponents);
}

}  // namespace

MxCodes encode_mx(const at::Tensor& x, Float8 format) {
  if (x.dim() == 0)
    throw ShapeError("encode_mx: found a scalar, expected at least one dimension: blocks lie along the last");
  const at::NoGradGuard no_grad;
  const at::Tensor blocks = in_blocks(x.detach().to(at::kFloat));
  const at::Tensor exponents = exponents_of(codes::amax(blocks, -1), format);
  const at::Tensor codes = encode(blocks, powers(exponents, -1), format);
  return {out_of_blocks(codes, x.sizes()), exponents.squeeze(-1)};
}

at::Tensor decode_mx(const MxCodes& codes, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  at::Tensor values = in_blocks(decode(codes.codes, {}, at::kFloat));
  return out_of_blocks(values.mul(powers(codes.exponents, 1).unsqueeze(-1)), codes.codes.sizes()).to(dtype);
}

}  // namespace accelerate::codes
