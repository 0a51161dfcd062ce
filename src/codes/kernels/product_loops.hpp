#pragma once

#include "codes/kernels/product.hpp"

// The loops of products on codes, for any vectors: included by the file of each instruction set, which compiles them
// for itself. Everything has internal linkage for that reason.
//
// A vector `Bytes` holds four columns of V::kRows rows, as do 4 * kRows of the 64 bytes of a line: row by row, the
// bytes of four columns. How lines follow from a block of a row is said in packed.cpp. 32 columns are eight vectors.

/// The next loop is short, and its variables are registers.
#if defined(__clang__)
#define ACCELERATE_UNROLL _Pragma("unroll")
#else
#define ACCELERATE_UNROLL _Pragma("GCC unroll 8")
#endif

namespace accelerate::codes::kernels {
namespace {

using Byte = unsigned char;

constexpr float kSmallest = 1e-30F;  ///< Inputs up to this count as 0: 127 divided by them might be endless.

template <class V> typename V::Bytes line(const Byte* lines, int64_t index, int64_t row) {
  return V::load(lines + 64 * index + 4 * row);
}

/// 32 columns of four lines: the low halves of the bytes are the first 16, the high halves the others.
template <class V> void nibbles(const Byte* lines, int64_t row, typename V::Bytes* to) {
  for (int i = 0; i < 4; ++i) {
    const auto both = line<V>(lines, i, row);
    to[i] = V::bits(both, 15);
    to[i + 4] = V::bits(V::right(both, 4), 15);
  }
}

/// 32 columns of eight lines: the low halves for even parts, the high halves for odd ones.
template <class V> void nibbles_of_pair(const Byte* lines, int64_t row, int part, typename V::Bytes* to) {
  for (int i = 0; i < 8; ++i) to[i] = V::bits(V::right(line<V>(lines, 8 * (part / 2) + i, row), part % 2 * 4), 15);
}

/// Moves bit `from` of each byte to bit `to`, and nothing else.
template <class V> typename V::Bytes moved_bit(typename V::Bytes bytes, int from, int to) {
  return V::bits(from < to ? V::left(bytes, to - from) : V::right(bytes, from - to), 1 << to);
}

/// Bit i of a line's bytes is the fifth bit of the columns 4 i to 4 i + 3.
template <class V> void add_fifth_bits(const Byte* lines, int64_t row, typename V::Bytes* to) {
  const auto fifth = line<V>(lines, 0, row);
  for (int i = 0; i < 8; ++i) to[i] = V::either(to[i], moved_bit<V>(fifth, i, 4));
}

// --- forms. Each says:
//   kColumns, kBytes   of a block of 16 rows
//   kSums              scales of a part
//   kLeast             whether weights have a least value; otherwise kOffset is subtracted from codes
//   Head               what all parts of a block share, made for rows [row, row + V::kRows)
//   unpack             codes of a part, its scales and least value

template <class V, int kSums> struct GroupPart {
  typename V::Bytes codes[8];
  typename V::Floats scale[kSums], least;
};

template <class V> struct OneScale {
  static constexpr int kColumns = 32, kSums = 1;
  static constexpr bool kLeast = false, kWide = false, kTable = false;
  struct Head {
    typename V::Floats scale;
    Head(const Product&, const Byte* block, const float*, int64_t row) : scale(V::halves(block + 2 * row)) {}
  };
};

template <class V> struct ScaleAndLeast : OneScale<V> {
  static constexpr bool kLeast = true;
  static constexpr float kOffset = -1;
  struct Head {
    typename V::Floats scale, least;
    Head(const Product&, const Byte* block, const float*, int64_t row)
        : scale(V::halves(block + 2 * row)), least(V::halves(block + 32 + 2 * row)) {}
  };
};

template <class V> struct Q4_0 : OneScale<V> {
  static constexpr int kBytes = 18 * 16;
  static constexpr float kOffset = 8;
  static void unpack(const Byte* block, const typename OneScale<V>::Head& head, int64_t row, int, GroupPart<V, 1>& to) {
    nibbles<V>(block + 32, row, to.codes);
    to.scale[0] = head.scale;
  }
};

template <class V> struct Q4_1 : ScaleAndLeast<V> {
  static constexpr int kBytes = 20 * 16;
  static void unpack(const Byte* block, const typename ScaleAndLeast<V>::Head& head, int64_t row, int,
                     GroupPart<V, 1>& to) {
    nibbles<V>(block + 64, row, to.codes);
    to.scale[0] = head.scale;
    to.least = head.least;
  }
};

template <class V> struct Q5_0 : OneScale<V> {
  static constexpr int kBytes = 22 * 16;
  static constexpr float kOffset = 16;
  static void unpack(const Byte* block, const typename OneScale<V>::Head& head, int64_t row, int, GroupPart<V, 1>& to) {
    nibbles<V>(block + 96, row, to.codes);
    add_fifth_bits<V>(block + 32, row, to.codes);
    to.scale[0] = head.scale;
  }
};

template <class V> struct Q5_1 : ScaleAndLeast<V> {
  static constexpr int kBytes = 24 * 16;
  static void unpack(const Byte* block, const typename ScaleAndLeast<V>::Head& head, int64_t row, int,
                     GroupPart<V, 1>& to) {
    nibbles<V>(block + 128, row, to.codes);
    add_fifth_bits<V>(block + 64, row, to.codes);
    to.scale[0] = head.scale;
    to.least = head.least;
  }
};

template <class V> struct Q8_0 : OneScale<V> {
  static constexpr int kBytes = 34 * 16;
  static constexpr bool kWide = true;
  static constexpr float kOffset = V::kWideOffset;
  static void unpack(const Byte* block, const typename OneScale<V>::Head& head, int64_t row, int, GroupPart<V, 1>& to) {
    for (int i = 0; i < 8; ++i) to.codes[i] = V::wide(line<V>(block + 32, i, row));
    to.scale[0] = head.scale;
  }
};

/// Scales and least values of 6 bits, eight of each in 12 bytes.
template <class V> struct SixBits {
  static constexpr int kColumns = 256, kSums = 1;
  static constexpr bool kLeast = true, kWide = false, kTable = false;
  static constexpr float kOffset = -1;
  struct Head {
    typename V::Floats scale, least;
    Head(const Product&, const Byte* block, const float*, int64_t row)
        : scale(V::halves(block + 2 * row)), least(V::negative(V::halves(block + 32 + 2 * row))) {}
  };
  static void scales(const Byte* block, const Head& head, int64_t row, int part, GroupPart<V, 1>& to) {
    const auto at = [&](int64_t i) { return V::load_small(block + 64 + 16 * i + row); };
    const bool plain = part < 4;  // otherwise the upper two bits lie with the plain ones
    const auto scale =
        plain ? V::bits(at(part), 63) : V::either(V::bits(at(part + 4), 15), V::bits(V::right(at(part - 4), 2), 48));
    const auto least = plain ? V::bits(at(part + 4), 63)
                             : V::either(V::bits(V::right(at(part + 4), 4), 15), V::bits(V::right(at(part), 2), 48));
    to.scale[0] = V::times(head.scale, V::to_floats(scale));
    to.least = V::times(head.least, V::to_floats(least));
  }
};

template <class V> struct Q4_K : SixBits<V> {
  static constexpr int kBytes = 144 * 16;
  static void unpack(const Byte* block, const typename SixBits<V>::Head& head, int64_t row, int part,
                     GroupPart<V, 1>& to) {
    nibbles_of_pair<V>(block + 256, row, part, to.codes);
    SixBits<V>::scales(block, head, row, part, to);
  }
};

template <class V> struct Q5_K : SixBits<V> {
  static constexpr int kBytes = 176 * 16;
  static void unpack(const Byte* block, const typename SixBits<V>::Head& head, int64_t row, int part,
                     GroupPart<V, 1>& to) {
    nibbles_of_pair<V>(block + 768, row, part, to.codes);
    for (int i = 0; i < 8; ++i)
      to.codes[i] = V::either(to.codes[i], moved_bit<V>(line<V>(block + 256, i, row), part, 4));
    SixBits<V>::scales(block, head, row, part, to);
  }
};

template <class V> struct Q6_K {
  static constexpr int kColumns = 256, kBytes = 210 * 16, kSums = 2;
  static constexpr bool kLeast = false, kWide = false, kTable = false;
  static constexpr float kOffset = 32;
  struct Head {
    typename V::Floats scale;
    Head(const Product&, const Byte* block, const float*, int64_t row) : scale(V::halves(block + 3328 + 2 * row)) {}
  };
  static void unpack(const Byte* block, const Head& head, int64_t row, int part, GroupPart<V, 2>& to) {
    const Byte *low = block, *high = block + 2048;
    for (int i = 0; i < 8; ++i) {
      const auto lower =
          V::bits(V::right(line<V>(low, 16 * (part / 4) + 8 * (part % 2) + i, row), part % 4 / 2 * 4), 15);
      const auto upper = line<V>(high, 8 * (part / 4) + i, row);
      to.codes[i] = V::either(lower, V::left(V::bits(V::right(upper, part % 4 * 2), 3), 4));
    }
    for (int64_t half = 0; half < 2; ++half)
      to.scale[half] =
          V::times(head.scale, V::to_signed_floats(V::load_small(block + 3072 + 32 * int64_t{part} + 16 * half + row)));
  }
};

/// Scales that lie apart.
template <class V> struct Apart {
  static constexpr int kColumns = 32, kSums = 1;
  static constexpr bool kLeast = false, kWide = true, kTable = false;
  struct Head {
    typename V::Floats scale;
    Head(const Product&, const Byte*, const float* scales, int64_t row) : scale(V::numbers(scales + row)) {}
  };
};

template <class V> struct WholeBytes : Apart<V> {
  static constexpr int kBytes = 32 * 16;
  static constexpr float kOffset = V::kWideOffset;
  static void unpack(const Byte* block, const typename Apart<V>::Head& head, int64_t row, int, GroupPart<V, 1>& to) {
    for (int i = 0; i < 8; ++i) to.codes[i] = V::wide(line<V>(block, i, row));
    to.scale[0] = head.scale;
  }
};

/// Codes are indices; what they stand for has 14 bits, of which each half takes a product.
template <class V> struct Table : Apart<V> {
  static constexpr int kBytes = 16 * 16;
  static constexpr bool kWide = false, kTable = true;
  static constexpr float kOffset = 8192;
  static void unpack(const Byte* block, const typename Apart<V>::Head& head, int64_t row, int, GroupPart<V, 1>& to) {
    nibbles<V>(block, row, to.codes);
    to.scale[0] = head.scale;
  }
};

// --- loops
// ------------------------------------------------------------------------------------------------------------

template <class V, class F> typename V::Ints dot(typename V::Ints sum, typename V::Bytes codes, const signed char* x) {
  int32_t four = 0;
  __builtin_memcpy(&four, x, sizeof four);
  if constexpr (F::kWide) return V::dot_wide(sum, codes, four);
  else return V::dot(sum, codes, four);
}

/// Rows [row, row + V::kRows) of a group are so many columns of y, as far as it has them.
template <class V>
void store_columns(const Product& p, int64_t group, int64_t of_x, int64_t row, typename V::Floats sums) {
  float* const to = p.y + of_x * p.n + group * kGroup + row;
  const int64_t columns = p.n - group * kGroup - row;
  if (V::kRows <= columns) return V::store(to, sums);
  float all[V::kRows];
  V::store(all, sums);
  for (int64_t i = 0; i < columns; ++i) to[i] = all[i];
}

/// 16 columns of kTile rows of y. Codes are unpacked once for all of them.
template <class V, class F, int kTile> void tile(const Product& p, int64_t group, int64_t first) {
  const int64_t parts = p.k / kPart, columns = p.n - group * kGroup;
  const Byte* const codes = p.codes + group * p.group_bytes;
  const float* const scales = p.scales ? p.scales + group * kGroup * (parts / p.period) : nullptr;
  for (int64_t row = 0; row < kGroup && row < columns; row += V::kRows) {
    typename V::Floats total[kTile];
    for (auto& sum : total) sum = V::all(0);
    typename V::Entries upper{}, lower{};
    if constexpr (F::kTable) upper = V::table(p.table), lower = V::table(p.table + 16);
    int64_t period = 0;
    const float* scale = scales;
    const Byte* block = codes;
    for (int64_t at = 0; at < parts; at += F::kColumns / kPart, block += F::kBytes) {
      const typename F::Head head(p, block, scale, row);
      if (scales && ++period == p.period) period = 0, scale += kGroup;
      for (int inner = 0; inner < F::kColumns / kPart; ++inner) {
        // The next bytes are prefetched: processors don't foresee the turns that the parts of a large block take, and
        // with several rows of x they look ahead no further than those. One row with small blocks goes straight on,
        // which they foresee better.
        constexpr int kParts = F::kColumns / kPart, kAhead = kParts > 1 ? 1 : 4;
        if constexpr (kParts > 1 || kTile > 1)
          for (int i = 0; i < F::kBytes / kParts; i += 64)
            __builtin_prefetch(block + F::kBytes * kAhead + F::kBytes / kParts * inner + i);
        GroupPart<V, F::kSums> part;
        F::unpack(block, head, row, inner, part);
        typename V::Bytes fine[8];
        if constexpr (F::kTable) {
          for (int i = 0; i < 8; ++i) {
            fine[i] = V::look_up(lower, part.codes[i]);
            part.codes[i] = V::look_up(upper, part.codes[i]);
          }
        }
        ACCELERATE_UNROLL
        for (int r = 0; r < kTile; ++r) {
          const int64_t place = (first + r) * parts + at + inner;
          const signed char* const x = p.inputs + place * kPart;
          const auto input_scale = V::all(p.input_scales[place]);
          ACCELERATE_UNROLL
          for (int64_t s = 0; s < F::kSums; ++s) {
            auto sum = V::zero();
            if constexpr (F::kTable) {
              // Side by side: each four of x is loaded once for both.
              auto lower_sum = V::zero();
              ACCELERATE_UNROLL
              for (int64_t i = 0; i < 8; ++i) {
                sum = dot<V, F>(sum, part.codes[i], x + 4 * i);
                lower_sum = dot<V, F>(lower_sum, fine[i], x + 4 * i);
              }
              sum = V::sum(V::times_128(sum), lower_sum);
            } else {
              ACCELERATE_UNROLL
              for (int64_t i = 0; i < 8 / F::kSums; ++i)
                sum = dot<V, F>(sum, part.codes[s * 4 + i], x + 4 * (s * 4 + i));
            }
            const auto input_sum = V::all(p.input_sums[place * F::kSums + s]);
            if constexpr (F::kLeast) {
              total[r] = V::fused(V::times(part.scale[s], input_scale), V::to_floats_of(sum), total[r]);
              total[r] = V::fused(part.least, input_sum, total[r]);
            } else {
              const auto centred = V::fused(input_scale, V::to_floats_of(sum), input_sum);
              total[r] = V::fused(part.scale[s], centred, total[r]);
            }
          }
        }
      }
    }
    for (int r = 0; r < kTile; ++r) store_columns<V>(p, group, first + r, row, total[r]);
  }
}

template <class V, class F> void product(const Product& p, int64_t group, int64_t first, int64_t last) {
  if constexpr (V::kTile >= 8)
    for (; first + 8 <= last; first += 8) tile<V, F, 8>(p, group, first);
  if constexpr (V::kTile >= 4)
    for (; first + 4 <= last; first += 4) tile<V, F, 4>(p, group, first);
  if constexpr (V::kTile >= 2)
    for (; first + 2 <= last; first += 2) tile<V, F, 2>(p, group, first);
  for (; first < last; ++first) tile<V, F, 1>(p, group, first);
}

/// As tile() for whole numbers, whose sums need no scales on the way, and for kGroups groups: what is read of x serves
/// all of them.
template <class V, int kTile, int kGroups> void whole_tile(const Product& p, int64_t group, int64_t first) {
  static_assert(kGroups == 1 || V::kRows == kGroup);
  const int64_t parts = p.k / kPart;
  for (int64_t row = 0; row < kGroup && row < p.n - group * kGroup; row += V::kRows) {
    typename V::Ints total[kGroups * kTile];
    for (auto& sum : total) sum = V::zero();
    const Byte* block = p.codes + group * p.group_bytes;
    for (int64_t at = 0; at < parts; ++at, block += 512) {
      // Row by row of x within: each step would wait for the one before it in its sum.
      const signed char* const x = p.inputs + first * p.k + at * kPart;
      ACCELERATE_UNROLL
      for (int64_t i = 0; i < 8; ++i) {
        typename V::Bytes codes[kGroups];
        for (int g = 0; g < kGroups; ++g) codes[g] = V::wide(line<V>(block + g * p.group_bytes, i, row));
        ACCELERATE_UNROLL
        for (int r = 0; r < kTile; ++r)
          for (int g = 0; g < kGroups; ++g)
            total[g * kTile + r] = dot<V, WholeBytes<V>>(total[g * kTile + r], codes[g], x + r * p.k + 4 * i);
      }
    }
    for (int g = 0; g < kGroups; ++g)
      for (int r = 0; r < kTile; ++r)
        store_columns<V>(p, group + g, first + r, row,
                         V::to_floats_of(V::sum(total[g * kTile + r], V::all_ints(p.whole_sums[first + r]))));
  }
}

template <class V, int kGroups> void whole_tiles(const Product& p, int64_t group, int64_t first, int64_t last) {
  if constexpr (V::kTile >= 8)
    for (; first + 8 <= last; first += 8) whole_tile<V, 8, kGroups>(p, group, first);
  if constexpr (V::kTile >= 4)
    for (; first + 4 <= last; first += 4) whole_tile<V, 4, kGroups>(p, group, first);
  for (; first < last; ++first) whole_tile<V, 1, kGroups>(p, group, first);
}

template <class V> void whole_product(const Product& p, int64_t group, int64_t groups, int64_t first, int64_t last) {
  // Only a vector of all rows leaves registers for the sums of two groups.
  if constexpr (V::kTile >= 8)
    for (; groups >= 2; groups -= 2, group += 2) whole_tiles<V, 2>(p, group, first, last);
  for (; groups > 0; --groups, ++group) whole_tiles<V, 1>(p, group, first, last);
}

/// The rest of a part that `columns` ends in: x, then zeros.
inline void last_part(const float* x, int64_t count, float* to) {
  for (int64_t i = 0; i < kPart; ++i) to[i] = i < count ? x[i] : 0;
}

template <class V>
void quantize(const float* x, int64_t columns, int64_t k, float unit, int sums, float factor, signed char* inputs,
              float* scales, float* input_sums) {
  for (int64_t at = 0; at < k; at += kPart, inputs += kPart, ++scales, input_sums += sums) {
    float rest[kPart];
    const float* from = x + at;
    if (at + kPart > columns) last_part(from, columns - at, rest), from = rest;
    int32_t halves[2];
    *scales = unit * V::quantize_part(from, inputs, halves);
    for (int s = 0; s < sums; ++s)
      input_sums[s] = factor * *scales * static_cast<float>(sums == 2 ? halves[s] : halves[0] + halves[1]);
  }
}

template <class V> void four_bits(const Byte* from, int64_t bytes, const float* table, float scale, float* to) {
  const auto values = V::sixteen(table, scale);
  for (; bytes >= V::kNumbers / 2; bytes -= V::kNumbers / 2, from += V::kNumbers / 2, to += V::kNumbers)
    V::numbers_of_halves(values, from, to);
  for (; bytes > 0; --bytes, ++from, to += 2) to[0] = table[*from >> 4] * scale, to[1] = table[*from & 15] * scale;
}

template <class V> constexpr InstructionSet instructions(const char* name) {
  return {
      name,
      quantize<V>,
      {product<V, Q4_0<V>>, product<V, Q4_1<V>>, product<V, Q5_0<V>>, product<V, Q5_1<V>>, product<V, Q8_0<V>>,
       product<V, Q4_K<V>>, product<V, Q5_K<V>>, product<V, Q6_K<V>>, product<V, WholeBytes<V>>, product<V, Table<V>>},
      {-Q4_0<V>::kOffset, -Q4_1<V>::kOffset, -Q5_0<V>::kOffset, -Q5_1<V>::kOffset, -Q8_0<V>::kOffset, -Q4_K<V>::kOffset,
       -Q5_K<V>::kOffset, -Q6_K<V>::kOffset, -WholeBytes<V>::kOffset, -Table<V>::kOffset},
      {1, 1, 1, 1, 1, 1, 1, 2, 1, 1},
      /*table_takes_words=*/false,
      whole_product<V>,
      four_bits<V>};
}

}  // namespace
}  // namespace accelerate::codes::kernels
