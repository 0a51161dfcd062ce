#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "codes/kernels/packed.hpp"
#include "codes/kernels/product.hpp"

namespace accelerate::codes::kernels {

/// The sets that this processor has, the fastest first; the plain one is always there.
const std::vector<const InstructionSet*>& instruction_sets();

/// The fastest that ATEN_CPU_CAPABILITY, which is LibTorch's own setting, allows.
const InstructionSet& instruction_set();
/// Whether that is another than the plain one, which is for tests: there, decoding is faster.
bool has_fast_instructions();

/// x w^T with inputs rounded to signed bytes, in parts of 32 with a scale each. A row of x with a NaN or an infinite
/// number becomes NaN.
/// @param x  [.., K] fp32, contiguous. @return [.., N] fp32
at::Tensor multiply(const InstructionSet& instructions, const at::Tensor& x, const Packed& packed);

/// One row of inputs, rounded once for several weights.
class RoundedRow {
 public:
  /// @param x  [columns] of the weight
  RoundedRow(const InstructionSet& instructions, const float* x, const Packed& weight);
  /// Whether another weight would have its inputs rounded so.
  bool suits(const Packed& weight) const;
  /// Columns [16 * begin, 16 * end) of x w^T, as far as there are so many: as multiply() has them, to the bit.
  /// @param y  where column 0 goes
  void multiply(const Packed& weight, int64_t begin, int64_t end, float* y) const;

 private:
  const InstructionSet& instructions_;
  int64_t k_;
  float unit_, factor_;
  int sums_;
  bool takes_words_;
  std::vector<signed char> inputs_;
  std::vector<int16_t> words_;
  std::vector<float> scales_, input_sums_;
};

/// x w^T of whole numbers, for weights of Form::bytes without their scales. Sums are whole numbers, of which fp32 has
/// those up to 2^24.
/// @param x  int8 [R, K], contiguous, from -127 to 127. @return fp32 [R, N]
at::Tensor multiply_whole(const InstructionSet& instructions, const at::Tensor& x, const Packed& packed);

}  // namespace accelerate::codes::kernels
