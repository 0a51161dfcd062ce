#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include "accelerate/codes/codes.hpp"
#include "codes/kernels/product.hpp"

namespace accelerate::codes::kernels {

/// A matrix of codes in the order in which products read them: 16 rows interleaved, no bit more than before (but for
/// rows up to a multiple of 16, and scales of nf4, fp4 and int8_rowwise as fp32).
struct Packed {
  Form form = Form::q4_0;
  int64_t n = 0, columns = 0;
  int64_t k = 0;       ///< columns, up to a multiple of kPart
  at::Tensor codes;    ///< uint8 [groups, bytes of a group]
  at::Tensor scales;   ///< fp32 [groups, k / (kPart * period), kGroup], or undefined: within the blocks
  int64_t period = 0;  ///< parts that share one of `scales`
  float unit = 1;      ///< what a code is multiplied by, beside its scale
  unsigned char table[32] = {};

  int64_t groups() const { return codes.size(0); }
};

/// The form in which products read this encoding; none where there are none.
std::optional<Form> form_of(Encoding encoding);

/// @param codes  [N, K], checked. @return none where rows are no whole number of blocks (nf4 and fp4, whose blocks go
/// on from row to row), or where there is no form
std::optional<Packed> pack(const Codes& codes);

}  // namespace accelerate::codes::kernels
