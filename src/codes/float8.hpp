#pragma once

#include <ATen/core/Tensor.h>

#include "accelerate/codes/float8.hpp"

namespace accelerate::codes {

struct Float8Request {
  bool codes = true, values = false, amax = false;
};
/// The results that were asked for; the others stay undefined.
struct Float8Result {
  at::Tensor codes;   ///< of x's shape, contiguous
  at::Tensor values;  ///< fp32 of x's shape, contiguous: what the codes stand for, not divided by the scale
  at::Tensor amax;    ///< fp32 scalar: of x
};
/// encode(), and what else one pass over x gives. @param scale  fp32, one element
Float8Result encode_once(const at::Tensor& x, const at::Tensor& scale, Float8 format, Float8Request request);

}  // namespace accelerate::codes
