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
  GroupForm form = GroupForm::q4_0;
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
std::optional<GroupForm> form_of(Encoding encoding);

/// Whether there is a form, and rows are whole numbers of blocks (those of nf4 and fp4 may go on from row to row).
bool can_be_packed(const Codes& codes);
/// @param codes  [N, K], checked, with data. @return none where they can't be packed
std::optional<Packed> pack(const Codes& codes);

/// The inverse for rows [first, first + count), to the bit: what these have in Codes::data.
void unpack(const Packed& packed, int64_t first, int64_t count, void* data);
/// The scales of nf4, fp4 and int8_rowwise: fp32 [scales of these rows].
at::Tensor unpacked_scales(const Packed& packed, int64_t first, int64_t count);
/// These columns of int8_rowwise's codes. @param columns  int64 [C] @return fp32 [N, C]
at::Tensor columns_of_bytes(const Packed& packed, const at::Tensor& columns);

}  // namespace accelerate::codes::kernels
