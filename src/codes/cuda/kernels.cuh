#pragma once

// Kernels on codes for NVIDIA's GPUs. NVRTC compiles this text when a program runs (nvrtc.cpp), one kernel at a time;
// tests compile it for the host, with a block's threads as fibers (tests/support/cuda_emulation.hpp), and so know its
// numbers without a GPU. Words that only a GPU's compiler understands stand in the next few lines, and at the end.
//
// A decoded value is worked out with the operations, and in the order, of formats/gguf_encodings.cpp and
// codes/decode.cpp: no product and sum are fused but by multiply_add, and results agree to the bit.

#include "codes/cuda/arguments.cuh"

namespace accelerate::codes::cuda {

#ifdef __CUDACC_RTC__
/// Before a loop whose index chooses registers: unless it is taken apart, they are memory.
#define ACCELERATE_UNROLL _Pragma("unroll")
inline float float_of(unsigned bits) { return __uint_as_float(bits); }
inline unsigned bits_of(float value) { return __float_as_uint(value); }
inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
inline float half_to_float(unsigned short half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
inline unsigned short float_to_half(float value) {
  unsigned short half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
}
/// The sum over the 32 threads of a warp, all of which must call it.
inline float warp_sum(float value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0U, value, distance);
  return value;
}
#endif

using Byte = unsigned char;

struct alignas(16) Words {
  unsigned word[4];
};
struct alignas(8) TwoWords {
  unsigned word[2];
};

/// The word at an address that is a multiple of `kAlignment`: 2 or 4.
template <int kAlignment> inline unsigned word_at(const Byte* bytes) {
  if constexpr (kAlignment >= 4) return *reinterpret_cast<const unsigned*>(bytes);
  const auto* halves = reinterpret_cast<const unsigned short*>(bytes);
  return halves[0] | static_cast<unsigned>(halves[1]) << 16;
}

inline float half_at(const Byte* bytes) { return half_to_float(*reinterpret_cast<const unsigned short*>(bytes)); }

/// code - zero, exact for codes below 2^22: as the fraction of 2^23 + code. GPUs convert whole numbers at a fraction of
/// the rate of additions.
inline float number(unsigned code, int zero = 0) {
  return float_of(0x4B000000U | code) - static_cast<float>(8388608 + zero);
}

inline unsigned byte_of(unsigned word, int i) { return word >> (8 * i) & 255U; }

// --- numbers of x and of results -----------------------------------------------------------------------------------

struct Float {
  using Stored = float;
  static float get(Stored stored) { return stored; }
  static Stored put(float value) { return value; }
};

struct Half {
  using Stored = unsigned short;
  static float get(Stored stored) { return half_to_float(stored); }
  static Stored put(float value) { return float_to_half(value); }
};

struct BFloat16 {
  using Stored = unsigned short;
  static float get(Stored stored) { return float_of(static_cast<unsigned>(stored) << 16); }
  /// To the nearest, ties to even; without branches, and NaN stays one.
  static Stored put(float value) {
    const unsigned bits = bits_of(value), rounded = bits + 0x7FFFU + (bits >> 16 & 1U);
    return static_cast<Stored>(value == value ? rounded >> 16 : 0x7FC0U);
  }
};

/// 8 numbers at once, `from` aligned to 16 bytes.
template <class T> inline void load8(const typename T::Stored* from, float (&to)[8]) {
  if constexpr (sizeof(typename T::Stored) == 4) {
    for (int half = 0; half < 2; ++half) {
      const Words words = *reinterpret_cast<const Words*>(from + 4 * half);
      for (int i = 0; i < 4; ++i) to[4 * half + i] = float_of(words.word[i]);
    }
  } else {
    const Words words = *reinterpret_cast<const Words*>(from);
    for (int i = 0; i < 8; ++i)
      to[i] = T::get(static_cast<unsigned short>(words.word[i / 2] >> (16 * (i % 2)) & 0xFFFFU));
  }
}

template <class T> inline void store8(const float (&from)[8], typename T::Stored* to) {
  if constexpr (sizeof(typename T::Stored) == 4) {
    for (int half = 0; half < 2; ++half) {
      Words words;
      for (int i = 0; i < 4; ++i) words.word[i] = bits_of(from[4 * half + i]);
      *reinterpret_cast<Words*>(to + 4 * half) = words;
    }
  } else {
    Words words;
    for (int i = 0; i < 4; ++i)
      words.word[i] = T::put(from[2 * i]) | static_cast<unsigned>(T::put(from[2 * i + 1])) << 16;
    *reinterpret_cast<Words*>(to) = words;
  }
}

// --- encodings -----------------------------------------------------------------------------------------------------
//
// A unit is 16 elements of a row that one thread reads together: two runs of 8 neighbours, since a byte of GGUF's
// blocks holds elements that are far apart. place(unit, run) is where in its row a run begins; read() gives a unit's
// codes as numbers, and its scales. Encodings whose rows need be no whole number of units have element(), one value.

struct Encoding {
  static constexpr bool kTable = false;    ///< codes are places in Weight::table
  static constexpr bool kLeast = false;    ///< values are code * scale + least, else
  static constexpr float kInverse = 1.0F;  ///< code * scale * kInverse
};

struct Unit {
  float code[2][8];  ///< by run
  float scale[2];
  float least[2];
};

/// Codes 4 bits wide that begin at bit `shift` of the bytes of a word.
inline void nibbles_of(unsigned word, int shift, int zero, float* to) {
  for (int i = 0; i < 4; ++i) to[i] = number(word >> (8 * i + shift) & 15U, zero);
}

inline float scale_of(const Weight& w, long long block) {
  if (!w.absmax) return static_cast<const float*>(w.scales)[block];
  return w.map[static_cast<const Byte*>(w.scales)[block]] * w.absmax[block >> w.nested_shift] + w.offset;
}

struct Int8Rowwise : Encoding {
  static constexpr float kInverse = 7.874015718698502e-3F;  // 1 / 127, as bitsandbytes writes it
  static int place(int unit, int run) { return kUnit * unit + 8 * run; }
  static void read(const Weight& w, const float*, long long row, int unit, Unit& to) {
    const Words words = *reinterpret_cast<const Words*>(w.data + row * w.columns + kUnit * unit);
    for (int i = 0; i < kUnit; ++i)
      to.code[i / 8][i % 8] = number(byte_of(words.word[i / 4] ^ 0x80808080U, i % 4), 128);
    to.scale[0] = to.scale[1] = static_cast<const float*>(w.scales)[row];
  }
  static float element(const Weight& w, const float*, long long row, long long column) {
    return static_cast<float>(static_cast<signed char>(w.data[row * w.columns + column])) *
           static_cast<const float*>(w.scales)[row] * kInverse;
  }
};

/// nf4 and fp4.
struct FourBit : Encoding {
  static constexpr bool kTable = true;
  static int place(int unit, int run) { return kUnit * unit + 8 * run; }
  static void read(const Weight& w, const float* table, long long row, int unit, Unit& to) {
    const long long first = row * w.columns + kUnit * unit;
    const TwoWords words = *reinterpret_cast<const TwoWords*>(w.data + first / 2);
    for (int i = 0; i < kUnit; ++i)  // the first of two in the high half
      to.code[i / 8][i % 8] = table[words.word[i / 8] >> (i % 8 / 2 * 8 + (1 - i % 2) * 4) & 15U];
    to.scale[0] = to.scale[1] = scale_of(w, first >> w.block_shift);
  }
  static float element(const Weight& w, const float* table, long long row, long long column) {
    const long long at = row * w.columns + column;
    const unsigned byte = w.data[at / 2];
    return table[at % 2 ? byte & 15U : byte >> 4] * scale_of(w, at >> w.block_shift);
  }
};

/// GGUF's blocks of 32: two units, of which each has 8 elements of the first half and 8 of the second.
template <int kBytes> struct BlockOf32 : Encoding {
  static int place(int unit, int run) { return unit / 2 * 32 + 16 * run + unit % 2 * 8; }
  static const Byte* block(const Weight& w, long long row, int unit) {
    return w.data + (row * (w.columns / 32) + unit / 2) * kBytes;
  }
};

/// Codes of 4 bits, or of 5 whose fifth bits lie together, little-endian.
/// @param kHead  bytes before these
template <int kBytes, int kHead, bool kHasLeast, int kBits> struct BlockOfNibbles : BlockOf32<kBytes> {
  static constexpr bool kLeast = kHasLeast;
  static void read(const Weight& w, const float*, long long row, int unit, Unit& to) {
    constexpr int kAlignment = kBytes % 4 == 0 ? 4 : 2, kCodes = kHead + (kBits == 5 ? 4 : 0),
                  kZero = kHasLeast ? 0 : 1 << (kBits - 1);
    const Byte* b = BlockOf32<kBytes>::block(w, row, unit);
    const int first = unit % 2 * 8;
    unsigned fifth = 0;
    if constexpr (kBits == 5) fifth = word_at<kAlignment>(b + kHead) >> first;
    for (int i = 0; i < 8; ++i) to.code[0][i] = to.code[1][i] = 0;
    for (int part = 0; part < 2; ++part) {
      const unsigned word = word_at<kAlignment>(b + kCodes + first + 4 * part);
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * part + i;
        to.code[0][at] = number((word >> (8 * i) & 15U) | (fifth >> at & 1U) << 4, kZero);
        to.code[1][at] = number((word >> (8 * i + 4) & 15U) | (fifth >> (16 + at) & 1U) << 4, kZero);
      }
    }
    to.scale[0] = to.scale[1] = half_at(b);
    if constexpr (kHasLeast) to.least[0] = to.least[1] = half_at(b + 2);
  }
};
using Q4_0 = BlockOfNibbles<18, 2, false, 4>;
using Q4_1 = BlockOfNibbles<20, 4, true, 4>;
using Q5_0 = BlockOfNibbles<22, 2, false, 5>;
using Q5_1 = BlockOfNibbles<24, 4, true, 5>;

struct Q8_0 : BlockOf32<34> {
  static int place(int unit, int run) { return kUnit * unit + 8 * run; }
  static void read(const Weight& w, const float*, long long row, int unit, Unit& to) {
    const Byte* b = block(w, row, unit);
    for (int part = 0; part < 4; ++part) {
      const unsigned word = word_at<2>(b + 2 + unit % 2 * kUnit + 4 * part) ^ 0x80808080U;
      for (int i = 0; i < 4; ++i) to.code[part / 2][part % 2 * 4 + i] = number(byte_of(word, i), 128);
    }
    to.scale[0] = to.scale[1] = half_at(b);
  }
};

/// GGUF's blocks of 256, the K family: eight parts of 32 elements, 16 units. A unit has 8 elements each of two parts,
/// from element `within` on of either.
template <int kBytes> struct BlockOf256 : Encoding {
  static const Byte* block(const Weight& w, long long row, int unit) {
    return w.data + (row * (w.columns / 256) + unit / 16) * kBytes;
  }
  static int within(int unit) { return unit % 4 * 8; }
};

/// Parts 2i and 2i + 1 are the low and the high halves of the same 32 bytes. Scales and least values are 6 bits each.
template <int kBytes, int kCodes> struct BlockOfSixBitPairs : BlockOf256<kBytes> {
  using Base = BlockOf256<kBytes>;
  static constexpr bool kLeast = true;
  static int place(int unit, int run) { return unit / 16 * 256 + unit % 16 / 4 * 64 + 32 * run + Base::within(unit); }
  static void read(const Weight& w, const float*, long long row, int unit, Unit& to) {
    const Byte* b = Base::block(w, row, unit);
    const int pair = unit % 16 / 4, within = Base::within(unit);
    const Words head = *reinterpret_cast<const Words*>(b);  // two fp16 numbers, and 12 bytes of scales
    const int shift = pair % 2 * 16;
    const unsigned first = head.word[1] >> shift, second = head.word[2] >> shift, third = head.word[3] >> shift;
    const unsigned scale = pair < 2 ? first & 0x3F3FU : (third & 0x0F0FU) | (first >> 2 & 0x3030U),
                   least = pair < 2 ? second & 0x3F3FU : (third >> 4 & 0x0F0FU) | (second >> 2 & 0x3030U);
    const float d = half_to_float(static_cast<unsigned short>(head.word[0] & 0xFFFFU)),
                d_least = half_to_float(static_cast<unsigned short>(head.word[0] >> 16));
    for (int run = 0; run < 2; ++run) {
      to.scale[run] = d * number(byte_of(scale, run));
      to.least[run] = -(d_least * number(byte_of(least, run)));
    }
    for (int part = 0; part < 2; ++part) {
      const int at = within + 4 * part;
      const unsigned word = word_at<4>(b + kCodes + 32 * pair + at);
      unsigned fifth = 0;
      if constexpr (kCodes > 16) fifth = word_at<4>(b + 16 + at) >> (2 * pair);
      for (int i = 0; i < 4; ++i) {
        to.code[0][4 * part + i] = number((word >> (8 * i) & 15U) | (fifth >> (8 * i) & 1U) << 4);
        to.code[1][4 * part + i] = number((word >> (8 * i + 4) & 15U) | (fifth >> (8 * i + 1) & 1U) << 4);
      }
    }
  }
};
using Q4_K = BlockOfSixBitPairs<144, 16>;
using Q5_K = BlockOfSixBitPairs<176, 48>;

struct Q6_K : BlockOf256<210> {
  /// Parts 4 half + side and two further.
  static int place(int unit, int run) {
    return unit / 16 * 256 + unit % 16 / 8 * 128 + 64 * run + unit % 8 / 4 * 32 + within(unit);
  }
  static void read(const Weight& w, const float*, long long row, int unit, Unit& to) {
    const Byte* b = block(w, row, unit);
    const int half = unit % 16 / 8, side = unit % 8 / 4;
    const float d = half_at(b + 208);
    for (int run = 0; run < 2; ++run)
      to.scale[run] = d * static_cast<float>(static_cast<signed char>(
                              b[192 + (4 * half + side + 2 * run) * 2 + (within(unit) >= 16 ? 1 : 0)]));
    for (int part = 0; part < 2; ++part) {
      const int at = within(unit) + 4 * part;
      const unsigned low = word_at<2>(b + 64 * half + 32 * side + at),
                     high = word_at<2>(b + 128 + 32 * half + at) >> (2 * side);
      for (int i = 0; i < 4; ++i) {
        to.code[0][4 * part + i] = number((low >> (8 * i) & 15U) | (high >> (8 * i) & 3U) << 4, 32);
        to.code[1][4 * part + i] = number((low >> (8 * i + 4) & 15U) | (high >> (8 * i + 4) & 3U) << 4, 32);
      }
    }
  }
};

/// Q2_K and Q3_K: a part's codes are two bits each of 32 bytes, of which four parts share the same.
template <int kBytes> struct BlockOfTwoBits : BlockOf256<kBytes> {
  /// The first of a unit's two parts, which are neighbours.
  static int part_of(int unit) { return unit % 16 / 4 * 2; }
  static int place(int unit, int run) {
    return unit / 16 * 256 + (part_of(unit) + run) * 32 + BlockOf256<kBytes>::within(unit);
  }
};

struct Q2_K : BlockOfTwoBits<84> {
  static constexpr bool kLeast = true;
  static void read(const Weight& w, const float*, long long row, int unit, Unit& to) {
    const Byte* b = block(w, row, unit);
    const int first = part_of(unit);
    for (int run = 0; run < 2; ++run) {
      const unsigned code = b[(first + run) * 2 + (within(unit) >= 16 ? 1 : 0)];
      to.scale[run] = half_at(b + 80) * number(code & 15U);
      to.least[run] = -(half_at(b + 82) * number(code >> 4));
    }
    for (int i = 0; i < 8; ++i) {
      const unsigned byte = static_cast<unsigned>(b[16 + first / 4 * 32 + within(unit) + i]) >> (first % 4 * 2);
      to.code[0][i] = number(byte & 3U);
      to.code[1][i] = number(byte >> 2 & 3U);
    }
  }
};

struct Q3_K : BlockOfTwoBits<110> {
  static void read(const Weight& w, const float*, long long row, int unit, Unit& to) {
    const Byte* b = block(w, row, unit);
    const int first = part_of(unit);
    for (int run = 0; run < 2; ++run) {
      const int group = (first + run) * 2 + (within(unit) >= 16 ? 1 : 0);
      const unsigned low = group < 8 ? b[96 + group] & 15U : static_cast<unsigned>(b[96 + group - 8]) >> 4,
                     high = static_cast<unsigned>(b[104 + group % 4]) >> (group / 4 * 2) & 3U;  // 6 bits in two places
      to.scale[run] = half_at(b + 108) * number(low | high << 4, 32);
    }
    for (int i = 0; i < 8; ++i) {
      const unsigned byte = static_cast<unsigned>(b[32 + first / 4 * 32 + within(unit) + i]) >> (first % 4 * 2),
                     third = static_cast<unsigned>(b[within(unit) + i]) >> first;
      to.code[0][i] = number((byte & 3U) | (third & 1U) << 2, 4);
      to.code[1][i] = number((byte >> 2 & 3U) | (third >> 1 & 1U) << 2, 4);
    }
  }
};

// --- kernels -------------------------------------------------------------------------------------------------------

/// Shared memory, where threads that look up different numbers of 16 don't wait for each other.
template <class E> inline void share_table(const Weight& w, float* table) {
  if constexpr (!E::kTable) return;
  if (threadIdx.x < 16) table[threadIdx.x] = w.table[threadIdx.x];
  __syncthreads();
}

/// Decodes rows, a unit to a thread. @param a  fewer than 2^31 units, columns a whole number of them
template <class E, class T> inline void decode(const Arguments& a) {
  __shared__ float table[16];
  share_table<E>(a.w, table);
  const unsigned units = static_cast<unsigned>(a.w.columns / kUnit), item = blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= a.count * units) return;
  const int unit = static_cast<int>(item % units);
  const long long i = item / units;
  Unit found;
  E::read(a.w, table, a.rows ? a.rows[i] : a.first + i, unit, found);
  auto* to = static_cast<typename T::Stored*>(a.to) + i * a.w.columns;
  for (int run = 0; run < 2; ++run) {
    float values[8];
    for (int j = 0; j < 8; ++j) {
      values[j] = found.code[run][j] * found.scale[run] * E::kInverse;
      if constexpr (E::kLeast) values[j] = values[j] + found.least[run];
    }
    store8<T>(values, to + E::place(unit, run));
  }
}

/// decode() for rows of any length, an element to a thread. @param a  fewer than 2^31 elements
template <class E, class T> inline void decode_any(const Arguments& a) {
  __shared__ float table[16];
  share_table<E>(a.w, table);
  const unsigned item = blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= a.count * a.w.columns) return;
  const long long i = item / a.w.columns, column = item % a.w.columns;
  static_cast<typename T::Stored*>(a.to)[item] =
      T::put(E::element(a.w, table, a.rows ? a.rows[i] : a.first + i, column));
}

/// x w^T + bias for kRows rows of x. A block has outputs_of_block(kRows) rows of w, which its threads share out among
/// themselves unit by unit; sums are fp32.
template <class E, class T, int kRows> inline void product(const Arguments& a) {
  constexpr int kOutputs = outputs_of_block(kRows);
  __shared__ float table[16];
  __shared__ float of_warps[kThreads / 32][kOutputs * kRows];
  share_table<E>(a.w, table);
  const long long first = static_cast<long long>(blockIdx.x) * kOutputs;
  const int units = static_cast<int>(a.w.columns / kUnit);
  float sums[kOutputs][kRows];
  for (int o = 0; o < kOutputs; ++o)
    for (int r = 0; r < kRows; ++r) sums[o][r] = 0;

  for (int unit = static_cast<int>(threadIdx.x); unit < units; unit += static_cast<int>(blockDim.x)) {
    Unit found[kOutputs];
    ACCELERATE_UNROLL
    for (int o = 0; o < kOutputs; ++o)  // beyond the last row: that one again, for nobody
      E::read(a.w, table, first + o < a.outputs ? first + o : a.outputs - 1, unit, found[o]);
    ACCELERATE_UNROLL
    for (int run = 0; run < 2; ++run) {
      const auto* x = static_cast<const typename T::Stored*>(a.x) + E::place(unit, run);
      ACCELERATE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float numbers[8], all = 0;
        load8<T>(x + r * a.w.columns, numbers);
        if constexpr (E::kLeast)
          for (int i = 0; i < 8; ++i) all += numbers[i];
        ACCELERATE_UNROLL
        for (int o = 0; o < kOutputs; ++o) {
          float sum = 0;
          for (int i = 0; i < 8; ++i) sum = multiply_add(found[o].code[run][i], numbers[i], sum);
          sums[o][r] = multiply_add(found[o].scale[run] * E::kInverse, sum, sums[o][r]);
          if constexpr (E::kLeast) sums[o][r] = multiply_add(found[o].least[run], all, sums[o][r]);
        }
      }
    }
  }

  ACCELERATE_UNROLL
  for (int o = 0; o < kOutputs; ++o) ACCELERATE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float sum = warp_sum(sums[o][r]);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32][o * kRows + r] = sum;
  }
  __syncthreads();
  const int at = static_cast<int>(threadIdx.x), o = at / kRows, r = at % kRows;
  if (at >= kOutputs * kRows || first + o >= a.outputs) return;
  float sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += of_warps[warp][at];
  if (a.bias) sum += T::get(static_cast<const typename T::Stored*>(a.bias)[first + o]);
  static_cast<typename T::Stored*>(a.to)[r * a.outputs + first + o] = T::put(sum);
}

}  // namespace accelerate::codes::cuda

#ifdef __CUDACC_RTC__
extern "C" __global__ void __launch_bounds__(accelerate::codes::cuda::kThreads)
    entry(const __grid_constant__ accelerate::codes::cuda::Arguments a) {
  using namespace accelerate::codes::cuda;
  KERNEL(a);  // such as decode<Q4_0, Half>, by the option -DKERNEL=
}
#endif
