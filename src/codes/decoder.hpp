#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>

#include "accelerate/codes/codes.hpp"
#include "codes/encodings.hpp"
#include "codes/kernels/product.hpp"

namespace accelerate::codes {

/// Decodes slices of the flattened tensor, of codes that have their data, on the CPU. To the bit the same with all
/// instructions. Several threads may use one.
class Decoder {
 public:
  explicit Decoder(Codes codes);
  /// Slices begin at a multiple of this, and GGUF's end at one: a block of GGUF's, or a byte of two codes.
  int64_t unit() const { return gguf_ ? gguf_->block : codes_.encoding == Encoding::int8_rowwise ? 1 : 2; }
  /// Elements [begin, end), fp32.
  void operator()(int64_t begin, int64_t end, float* to) const;

 private:
  void rowwise(int64_t begin, int64_t end, float* to) const;
  void four_bits(int64_t begin, int64_t end, float* to) const;

  const Codes codes_;
  const kernels::InstructionSet& instructions_;
  const formats::GgufEncoding* gguf_ = nullptr;
  at::Tensor scales_;
  c10::ArrayRef<float> table_;
  int64_t columns_;
};

}  // namespace accelerate::codes
