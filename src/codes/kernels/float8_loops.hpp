#pragma once

/// The loops of Float8Loops, for the compiler to turn into vectors. Each file that includes this is compiled for
/// another instruction set, so that nothing here may have a name that two of them share.

#include <algorithm>
#include <bit>
#include <cstdint>

#include "codes/kernels/float8.hpp"

namespace accelerate::codes::kernels {
namespace {

struct E4M3 {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr float kLargest = 448;
  static constexpr uint32_t kFirstSpecial = 0x7f;  ///< NaN; there is no infinity
};
struct E5M2 {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr float kLargest = 57344;
  static constexpr uint32_t kFirstSpecial = 0x7c;  ///< infinity, then NaN
};

constexpr uint32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

constexpr uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }

template <class Format, bool kCodes, bool kValues>
uint32_t encode_each(const float* from, int64_t count, float scale, uint8_t* codes, float* values) {
  constexpr int kShift = 23 - Format::kMantissa;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Format::kBias) << Format::kMantissa;
  constexpr auto kLargest = std::bit_cast<uint32_t>(Format::kLargest);
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - Format::kBias) << 23;
  // Numbers below that have one distance from each other, which fp32 has around this number: adding it rounds.
  constexpr uint32_t kGridBits = static_cast<uint32_t>(128 - Format::kBias + kShift) << 23;
  constexpr auto kGrid = std::bit_cast<float>(kGridBits);
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float x = from[i];
    largest = std::max(largest, std::bit_cast<uint32_t>(x) & kMagnitude);
    const uint32_t bits = std::bit_cast<uint32_t>(x * scale), magnitude = bits & kMagnitude;
    // Bits of magnitudes order like the numbers. Masks, as the compiler makes branches of conditions, and no vectors.
    const uint32_t exact = std::min(magnitude, kLargest);
    const uint32_t rounded = exact + ((1u << (kShift - 1)) - 1) + (exact >> kShift & 1);
    const float on_grid = std::bit_cast<float>(exact) + kGrid;
    const uint32_t small = 0u - static_cast<uint32_t>(exact < kSmallestNormal);
    const uint32_t nan = 0u - static_cast<uint32_t>(magnitude > kInfinity);
    if constexpr (kCodes) {
      const uint32_t code = choose(small, std::bit_cast<uint32_t>(on_grid) - kGridBits, (rounded >> kShift) - kRebias);
      codes[i] = static_cast<uint8_t>(choose(nan, 0x7f, code) | (bits >> 24 & 0x80));
    }
    if constexpr (kValues) {
      const uint32_t value = choose(small, std::bit_cast<uint32_t>(on_grid - kGrid), rounded >> kShift << kShift);
      values[i] = std::bit_cast<float>(choose(nan, magnitude, value) | (bits & ~kMagnitude));
    }
  }
  return largest;
}

template <class Format>
uint32_t encode_loop(const float* from, int64_t count, float scale, uint8_t* codes, float* values) {
  if (codes && values) return encode_each<Format, true, true>(from, count, scale, codes, values);
  if (codes) return encode_each<Format, true, false>(from, count, scale, codes, values);
  return encode_each<Format, false, true>(from, count, scale, codes, values);
}

template <class Format> void decode_loop(const uint8_t* codes, int64_t count, float factor, float* values) {
  constexpr int kShift = 23 - Format::kMantissa;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Format::kBias) << 23;
  constexpr auto kStep = std::bit_cast<float>(static_cast<uint32_t>(128 - Format::kBias - Format::kMantissa) << 23);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = codes[i], magnitude = code & 0x7f;
    const float on_grid = static_cast<float>(static_cast<int32_t>(magnitude)) * kStep;
    const uint32_t small = 0u - static_cast<uint32_t>(magnitude < 1u << Format::kMantissa);
    const uint32_t special = 0u - static_cast<uint32_t>(magnitude >= Format::kFirstSpecial);
    const uint32_t nan = 0u - static_cast<uint32_t>(magnitude > 0x7c);
    const uint32_t normal = (magnitude << kShift) + kRebias;
    const uint32_t value =
        choose(special, kInfinity | (nan & 0x400000), choose(small, std::bit_cast<uint32_t>(on_grid), normal));
    values[i] = std::bit_cast<float>(value | (code & 0x80) << 24) * factor;
  }
}

uint32_t amax_loop(const float* from, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(from[i]) & kMagnitude);
  return largest;
}

constexpr Float8Loops kFloat8Loops{
    {&encode_loop<E4M3>, &encode_loop<E5M2>}, {&decode_loop<E4M3>, &decode_loop<E5M2>}, &amax_loop};

}  // namespace
}  // namespace accelerate::codes::kernels
