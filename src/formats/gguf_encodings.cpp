#include "formats/gguf_encodings.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>

// Every number is worked out with the operations, in the order, and with the roundings that ggml uses, so that results
// agree to the bit. Loops are over the elements of one block, without branches, so that compilers vectorise them;
// without __restrict bytes might alias the result, and they could not.

namespace accelerate::formats {
namespace {

using Byte = unsigned char;

/// Takes any fp16 number, subnormal ones, infinities and NaN included. Without comparisons, which GCC would make
/// branches of.
float half_to_float(uint16_t half) {
  const uint32_t bits = half, sign = (bits & 0x8000U) << 16, exponent = bits & 0x7C00U, fraction = bits & 0x3FFU;
  constexpr uint32_t kRebias = 112U << 23;  // the exponents' zeros lie at 15 and 127
  // 1 for the largest exponent; all bits for the least.
  const uint32_t endless = (exponent + 0x400U) >> 15, tiny = 0U - ((exponent - 1U) >> 31);
  const uint32_t normal = ((bits & 0x7FFFU) << 13) + kRebias + endless * kRebias;
  const auto subnormal = std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(fraction)) * 0x1p-24F);
  return std::bit_cast<float>((subnormal & tiny) | (normal & ~tiny) | sign);
}

float scale_at(const Byte* bytes) {
  uint16_t half = 0;
  std::memcpy(&half, bytes, sizeof half);
  return half_to_float(half);
}

/// decode of an encoding whose blocks are independent: Block::kBytes, Block::kSize and Block::decode(from, to).
template <class Block> void decode_blocks(const Byte* from, int64_t blocks, float* to) {
  for (int64_t i = 0; i < blocks; ++i, from += Block::kBytes, to += Block::kSize) Block::decode(from, to);
}

/// Plain numbers.
template <class T> void decode_numbers(const Byte* __restrict from, int64_t count, float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof value), sizeof value);
    to[i] = static_cast<float>(value);
  }
}
void decode_f32(const Byte* __restrict from, int64_t count, float* __restrict to) {
  if (count > 0)
    std::memcpy(to, from,
                static_cast<size_t>(count) * sizeof(float));  // a tensor without elements has no memory to copy to
}
void decode_f16(const Byte* __restrict from, int64_t count, float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = scale_at(from + 2 * i);
}
void decode_bf16(const Byte* __restrict from, int64_t count, float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t upper = 0;
    std::memcpy(&upper, from + 2 * i, sizeof upper);
    to[i] = std::bit_cast<float>(static_cast<uint32_t>(upper) << 16);
  }
}

// --- blocks of 32: a scale, perhaps a least value, and codes. The low halves of the bytes are the first 16 codes, the
// high halves the others. -------------------------------------------

struct Q4_0 {
  static constexpr int kSize = 32, kBytes = 18;
  static void decode(const Byte* __restrict b, float* __restrict to) {
    const float d = scale_at(b);
    for (int j = 0; j < 16; ++j) {
      to[j] = d * static_cast<float>((b[2 + j] & 15) - 8);
      to[j + 16] = d * static_cast<float>((b[2 + j] >> 4) - 8);
    }
  }
};

struct Q4_1 {
  static constexpr int kSize = 32, kBytes = 20;
  static void decode(const Byte* __restrict b, float* __restrict to) {
    const float d = scale_at(b), least = scale_at(b + 2);
    for (int j = 0; j < 16; ++j) {
      to[j] = d * static_cast<float>(b[4 + j] & 15) + least;
      to[j + 16] = d * static_cast<float>(b[4 + j] >> 4) + least;
    }
  }
};

/// The fifth bits of 32 codes lie together, little-endian.
std::array<Byte, 32> fifth_bits(const Byte* b) {
  std::array<Byte, 32> repeated, fifth;  // small vector units can't shift each by another distance
  for (size_t j = 0; j < 4; ++j) std::memset(repeated.data() + 8 * j, b[j], 8);
  constexpr Byte kMasks[] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128,
                             1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  for (size_t j = 0; j < 32; ++j) fifth[j] = (repeated[j] & kMasks[j]) == kMasks[j] ? 16 : 0;
  return fifth;
}

struct Q5_0 {
  static constexpr int kSize = 32, kBytes = 22;
  static void decode(const Byte* __restrict b, float* __restrict to) {
    const float d = scale_at(b);
    const auto fifth = fifth_bits(b + 2);
    for (int j = 0; j < 16; ++j) {
      to[j] = d * static_cast<float>(((b[6 + j] & 15) | fifth[j]) - 16);
      to[j + 16] = d * static_cast<float>(((b[6 + j] >> 4) | fifth[j + 16]) - 16);
    }
  }
};

struct Q5_1 {
  static constexpr int kSize = 32, kBytes = 24;
  static void decode(const Byte* __restrict b, float* __restrict to) {
    const float d = scale_at(b), least = scale_at(b + 2);
    const auto fifth = fifth_bits(b + 4);
    for (int j = 0; j < 16; ++j) {
      to[j] = d * static_cast<float>((b[8 + j] & 15) | fifth[j]) + least;
      to[j + 16] = d * static_cast<float>((b[8 + j] >> 4) | fifth[j + 16]) + least;
    }
  }
};

struct Q8_0 {
  static constexpr int kSize = 32, kBytes = 34;
  static void decode(const Byte* __restrict b, float* __restrict to) {
    const float d = scale_at(b);
    for (int j = 0; j < 32; ++j) to[j] = static_cast<float>(static_cast<signed char>(b[2 + j])) * d;
  }
};

// --- blocks of 256, the K family: groups of 16 or 32 codes with scales that are codes themselves
// -----------------------------------------------------------------------------------------

struct Q2_K {
  static constexpr int kSize = 256, kBytes = 84;
  static void decode(const Byte* __restrict b, float* __restrict to) {
    const Byte *scales = b, *codes = b + 16;
    const float d = scale_at(b + 80), d_least = scale_at(b + 82);
    for (int part = 0; part < 8; ++part) {  // 32 codes: two bits of each of 32 bytes
      const Byte* q = codes + ptrdiff_t{32} * (part / 4);
      const int shift = part % 4 * 2;
      for (int half = 0; half < 2; ++half) {
        const Byte code = scales[part * 2 + half];
        const float scale = d * static_cast<float>(code & 15), least = d_least * static_cast<float>(code >> 4);
        for (int j = 0; j < 16; ++j)
          to[part * 32 + half * 16 + j] = scale * static_cast<float>(q[half * 16 + j] >> shift & 3) - least;
      }
    }
  }
};

struct Q3_K {
  static constexpr int kSize = 256, kBytes = 110;
  static void decode(const Byte* __restrict b, float* __restrict to) {
    const Byte *third = b, *codes = b + 32, *packed = b + 96;
    const float d = scale_at(b + 108);
    for (int part = 0; part < 8; ++part) {
      const Byte* q = codes + ptrdiff_t{32} * (part / 4);
      const int shift = part % 4 * 2;
      for (int half = 0; half < 2; ++half) {
        const int i = part * 2 + half;
        // 6 bits in two places.
        const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4, high = packed[8 + i % 4] >> (i / 4 * 2) & 3;
        const float scale = d * static_cast<float>((low | high << 4) - 32);
        for (int j = 0; j < 16; ++j) {
          const int at = half * 16 + j;
          to[i * 16 + j] = scale * static_cast<float>((q[at] >> shift & 3) - (third[at] >> part & 1 ? 0 : 4));
        }
      }
    }
  }
};

/// Scales and least values of Q4_K and Q5_K: eight of 6 bits each, in 12 bytes.
struct SixBitPairs {
  Byte scale[8], least[8];
  explicit SixBitPairs(const Byte* b) {
    for (int i = 0; i < 4; ++i) {
      scale[i] = b[i] & 63, least[i] = b[i + 4] & 63;
      scale[i + 4] = static_cast<Byte>((b[i + 8] & 15) | (b[i] >> 2 & 48));
      least[i + 4] = static_cast<Byte>((b[i + 8] >> 4) | (b[i + 4] >> 2 & 48));
    }
  }
};

struct Q4_K {
  static constexpr int kSize = 256, kBytes = 144;
  static void decode(const Byte* __restrict b, float* __restrict to) {
    const float d = scale_at(b), d_least = scale_at(b + 2);
    const SixBitPairs pairs(b + 4);
    for (int part = 0; part < 8; ++part) {
      const Byte* q = b + 16 + ptrdiff_t{32} * (part / 2);
      const int shift = part % 2 * 4;
      const float scale = d * static_cast<float>(pairs.scale[part]),
                  least = d_least * static_cast<float>(pairs.least[part]);
      for (int j = 0; j < 32; ++j) to[part * 32 + j] = scale * static_cast<float>(q[j] >> shift & 15) - least;
    }
  }
};

struct Q5_K {
  static constexpr int kSize = 256, kBytes = 176;
  static void decode(const Byte* __restrict b, float* __restrict to) {
    const float d = scale_at(b), d_least = scale_at(b + 2);
    const SixBitPairs pairs(b + 4);
    const Byte* fifth = b + 16;
    for (int part = 0; part < 8; ++part) {
      const Byte* q = b + 48 + ptrdiff_t{32} * (part / 2);
      const int shift = part % 2 * 4;
      const float scale = d * static_cast<float>(pairs.scale[part]),
                  least = d_least * static_cast<float>(pairs.least[part]);
      for (int j = 0; j < 32; ++j)
        to[part * 32 + j] = scale * static_cast<float>((q[j] >> shift & 15) | (fifth[j] >> part & 1) << 4) - least;
    }
  }
};

struct Q6_K {
  static constexpr int kSize = 256, kBytes = 210;
  static void decode(const Byte* __restrict b, float* __restrict to) {
    const float d = scale_at(b + 208);
    for (int part = 0; part < 8; ++part) {
      const Byte *low = b + ptrdiff_t{64} * (part / 4) + ptrdiff_t{32} * (part % 2),
                 *high = b + 128 + ptrdiff_t{32} * (part / 4);
      const int low_shift = part % 4 / 2 * 4, high_shift = part % 4 * 2;
      for (int half = 0; half < 2; ++half) {
        const float scale = d * static_cast<float>(static_cast<signed char>(b[192 + part * 2 + half]));
        for (int j = 0; j < 16; ++j) {
          const int at = half * 16 + j;
          to[part * 32 + at] =
              scale * static_cast<float>(((low[at] >> low_shift & 15) | (high[at] >> high_shift & 3) << 4) - 32);
        }
      }
    }
  }
};

template <class Block> constexpr GgufEncoding blocks(uint32_t id, const char* name) {
  return {id, name, Block::kSize, Block::kBytes, decode_blocks<Block>};
}

constexpr GgufEncoding kEncodings[] = {
    {0, "F32", 1, 4, decode_f32},
    {1, "F16", 1, 2, decode_f16},
    blocks<Q4_0>(2, "Q4_0"),
    blocks<Q4_1>(3, "Q4_1"),
    blocks<Q5_0>(6, "Q5_0"),
    blocks<Q5_1>(7, "Q5_1"),
    blocks<Q8_0>(8, "Q8_0"),
    {9, "Q8_1", 32, 40, nullptr},
    blocks<Q2_K>(10, "Q2_K"),
    blocks<Q3_K>(11, "Q3_K"),
    blocks<Q4_K>(12, "Q4_K"),
    blocks<Q5_K>(13, "Q5_K"),
    blocks<Q6_K>(14, "Q6_K"),
    {15, "Q8_K", 256, 292, nullptr},
    {16, "IQ2_XXS", 256, 66, nullptr},
    {17, "IQ2_XS", 256, 74, nullptr},
    {18, "IQ3_XXS", 256, 98, nullptr},
    {19, "IQ1_S", 256, 50, nullptr},
    {20, "IQ4_NL", 32, 18, nullptr},
    {21, "IQ3_S", 256, 110, nullptr},
    {22, "IQ2_S", 256, 82, nullptr},
    {23, "IQ4_XS", 256, 136, nullptr},
    {24, "I8", 1, 1, decode_numbers<int8_t>},
    {25, "I16", 1, 2, decode_numbers<int16_t>},
    {26, "I32", 1, 4, decode_numbers<int32_t>},
    {27, "I64", 1, 8, decode_numbers<int64_t>},
    {28, "F64", 1, 8, decode_numbers<double>},
    {29, "IQ1_M", 256, 56, nullptr},
    {30, "BF16", 1, 2, decode_bf16},
    {34, "TQ1_0", 256, 54, nullptr},
    {35, "TQ2_0", 256, 66, nullptr},
    {39, "MXFP4", 32, 17, nullptr},
    {40, "NVFP4", 64, 36, nullptr},
};

}  // namespace

const GgufEncoding* find_gguf_encoding(uint32_t id) {
  const auto* found = std::find_if(std::begin(kEncodings), std::end(kEncodings),
                                   [&](const GgufEncoding& encoding) { return encoding.id == id; });
  return found == std::end(kEncodings) ? nullptr : found;
}

}  // namespace accelerate::formats
