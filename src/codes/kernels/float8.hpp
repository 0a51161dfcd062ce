#pragma once

#include <cstdint>

namespace accelerate::codes::kernels {

/// Loops over numbers in 8 bits, compiled once per instruction set. The first index of each pair is E4M3, the second
/// E5M2. Infinities and what is too large saturate, NaN stays NaN, ties go to even.
struct Float8Loops {
  /// codes[i] of from[i] * scale, and values[i], the number that the code stands for; either pointer may be null.
  /// @return the bits of the largest |from[i]|; of a NaN if there is one
  uint32_t (*encode[2])(const float* from, int64_t count, float scale, uint8_t* codes, float* values);
  /// The values of codes, times `factor`.
  void (*decode[2])(const uint8_t* codes, int64_t count, float factor, float* values);
  /// The bits of the largest |from[i]|, of a NaN if there is one.
  uint32_t (*amax)(const float* from, int64_t count);
};

const Float8Loops& plain_float8();
/// Null where the compiler has no such instructions.
const Float8Loops* avx2_float8();
const Float8Loops* avx512_float8();

}  // namespace accelerate::codes::kernels
