#include "codes/k_blocks.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codes/encodings.hpp"
#include "codes/half_scale.hpp"

// The K family: 256 elements share a scale in fp16, and perhaps one for least values; each group of 16 or 32 has small
// whole numbers that these are multiplied by. The bytes of a block are as formats/gguf_encodings.cpp decodes them
// (source of the format: ggml's block_q2_K to block_q6_K). Which codes to choose is left to the encoder; this one makes
// the sum of squared errors small:
//
// 1. Each group by itself, with any scale. From each of several ranges that the codes might span: round to codes, and
//    solve for the scale and the least value that suit these codes best (least squares). From the best of them,
//    rounding and solving go on for a few more rounds.
// 2. The block's scales follow from the largest ones of its groups, in fp16. Each group takes the multiple, of those
//    next to its own scale, with which it is decoded best.
// 3. The block's scales are solved for with all codes as they are, and step 2 is done again; the better of both stays.
//
// Sums have eight parts whatever the processor's vectors have, and nothing is fused, so that all processors make the
// same codes.

#define ACCELERATE_INLINE inline __attribute__((always_inline))

namespace accelerate::codes {
namespace {

constexpr int kBlock = 256;
constexpr int kRounds = 2;

/// Eight elements: a vector, or two, or eight numbers, as the processor has it. Passed by reference only, because how
/// values are passed depends on that, too.
using Eight = float __attribute__((vector_size(32)));
constexpr int kLanes = 8;

ACCELERATE_INLINE float sum_of(const Eight& parts) {
  return ((parts[0] + parts[4]) + (parts[2] + parts[6])) + ((parts[1] + parts[5]) + (parts[3] + parts[7]));
}
ACCELERATE_INLINE void load(const float* from, Eight& to) { std::memcpy(&to, from, sizeof to); }

/// The nearest whole number of one below 2^22, of two the even one. Without a call, for the sake of vectors.
template <class T> ACCELERATE_INLINE void round(T& value) {
  constexpr float kShift = 12582912.0F;
  value = (value + kShift) - kShift;
}

/// How elements become codes: the nearest whole number to x * inverse + shift, within limits.
struct Rule {
  float inverse, shift, least, most;

  ACCELERATE_INLINE void apply(const Eight& x, Eight& code) const {
    code = x * inverse + shift;
    round(code);
    const Eight low = Eight{} + least, high = Eight{} + most;
    code = code < low ? low : code;
    code = code > high ? high : code;
  }
};

/// Sums over a group's codes q and elements x, from which scale and least value are solved for.
struct Sums {
  float q, qq, xq;
};

template <int Size> ACCELERATE_INLINE Sums sums_of(const float* x, const Rule& rule) {
  Eight q{}, qq{}, xq{}, values, codes;
  for (int i = 0; i < Size; i += kLanes) {
    load(x + i, values);
    rule.apply(values, codes);
    q += codes;
    qq += codes * codes;
    xq += values * codes;
  }
  return {sum_of(q), sum_of(qq), sum_of(xq)};
}

/// The sum of squared errors of codes that are decoded as scale * code - least.
template <int Size> ACCELERATE_INLINE float error_of(const float* x, const Rule& rule, float scale, float least) {
  Eight errors{}, values, codes;
  for (int i = 0; i < Size; i += kLanes) {
    load(x + i, values);
    rule.apply(values, codes);
    codes = scale * codes - least - values;
    errors += codes * codes;
  }
  return sum_of(errors);
}

template <int Size> ACCELERATE_INLINE void put_codes(const float* x, const Rule& rule, uint8_t* to) {
  Eight values, codes;
  for (int i = 0; i < Size; i += kLanes) {
    load(x + i, values);
    rule.apply(values, codes);
    for (int lane = 0; lane < kLanes; ++lane) to[i + lane] = static_cast<uint8_t>(codes[lane] - rule.least);
  }
}

/// Which ranges are tried in step 1: `count` for each end, `step` codes apart, `inner` of them within the elements' own
/// range. There are so many that half as many again would gain less than half a percent of the error.
struct Ranges {
  int count, inner;
  float step;

  constexpr float offset(int i) const { return static_cast<float>(i + inner + 1 - count) * step; }
};

/// A block before it is packed.
struct KBlock {
  c10::Half scale{}, least{};
  int scales[16] = {}, leasts[16] = {};
  uint8_t codes[kBlock] = {};  ///< counted from the least code
  float error = -1;            ///< not known yet
};

/// Divides a block by a power of two: to at most 1, so that squares are numbers, too. @return  it; 0 for a block all of
/// which is nearer to zero than to fp16's least number
ACCELERATE_INLINE float to_units(const float* from, float* to) {
  float most = 0;
  for (int i = 0; i < kBlock; ++i) most = std::max(most, std::abs(from[i]));
  if (most < 0x1p-25F) return 0;
  int exponent = 0;
  std::frexp(most, &exponent);
  const float inverse = std::ldexp(1.0F, -exponent);
  for (int i = 0; i < kBlock; ++i) to[i] = from[i] * inverse;
  return std::ldexp(1.0F, std::min(exponent, 127));  // above, fp16 holds none of them
}

/// A block's scale in fp16. Next to zero fp16 has few numbers: the one further off is taken where `most` would else be
/// beyond `last` times the scale.
c10::Half scale_for(float scale, float most, int last, float unit) {
  c10::Half half = half_scale(scale * unit);
  if (std::abs(static_cast<float>(half)) * (static_cast<float>(last) + 0.5F) < most * unit) ++half.x;
  return half;
}

ACCELERATE_INLINE int nearest_multiple(float value, float of, int least, int most) {
  if (of == 0) return 0;
  float multiple = std::clamp(value / of, static_cast<float>(least), static_cast<float>(most));
  round(multiple);
  return static_cast<int>(multiple);
}

ACCELERATE_INLINE float inverse_of(float scale) { return scale == 0 ? 0 : 1 / scale; }

// --- with least values: q2_k, q4_k, q5_k ----------------------------------------------------------------------------

/// scale * code - least; neither is negative.
struct Line {
  float scale = 0, least = 0;
};

/// The best one for these codes. @param x  the sum of the elements
ACCELERATE_INLINE Line solve(const Sums& sums, float x, float count) {
  const float determinant = count * sums.qq - sums.q * sums.q;
  if (determinant > 0) {
    const Line line{(count * sums.xq - x * sums.q) / determinant, (sums.q * sums.xq - sums.qq * x) / determinant};
    if (line.least >= 0) return line;
  }
  return {sums.qq > 0 ? sums.xq / sums.qq : 0, 0};
}

template <int Size, int Last> ACCELERATE_INLINE Line fit_line(const float* x, const Ranges& ranges) {
  float low = 0, high = x[0];
  Eight parts{}, values;
  for (int i = 0; i < Size; ++i) low = std::min(low, x[i]), high = std::max(high, x[i]);
  for (int i = 0; i < Size; i += kLanes) load(x + i, values), parts += values;
  const float span = high - low, sum = sum_of(parts);
  Line best{0, -low};
  if (!(span > 0)) return best;
  float most = -1;
  const auto is_better = [&](const Rule& rule) __attribute__((always_inline)) {
    const Sums sums = sums_of<Size>(x, rule);
    const Line line = solve(sums, sum, Size);
    // The solution lowers the sum of squares by so much.
    const float gain = line.scale * sums.xq - line.least * sum;
    if (!(gain > most) || !(line.scale > 0)) return false;
    most = gain, best = line;
    return true;
  };
  for (int i = 0; i < ranges.count; ++i)
    for (int j = 0; j < ranges.count; ++j) {
      const float from = low + span / Last * ranges.offset(i), until = high - span / Last * ranges.offset(j);
      const float inverse = Last / (until - from);
      is_better({inverse, -from * inverse, 0, Last});
    }
  for (int i = 0; i < kRounds && best.scale > 0; ++i) {
    const float inverse = 1 / best.scale;
    if (!is_better({inverse, best.least * inverse, 0, Last})) break;
  }
  return best;
}

template <int Groups, int Last, int LastScale>
ACCELERATE_INLINE KBlock fit_with_least(const float* from, const Ranges& ranges) {
  constexpr int kSize = kBlock / Groups;
  float x[kBlock];
  KBlock best;
  const float unit = to_units(from, x);
  if (unit == 0) return best;
  Line lines[Groups];
  Line most;
  for (int64_t g = 0; g < Groups; ++g) {
    lines[g] = fit_line<kSize, Last>(x + g * kSize, ranges);
    most = {std::max(most.scale, lines[g].scale), std::max(most.least, lines[g].least)};
  }
  Line wanted{most.scale / LastScale, most.least / LastScale};
  KBlock now;
  for (int pass = 0; pass < 2; ++pass) {
    now.scale = scale_for(wanted.scale, pass == 0 ? most.scale : 0, LastScale, unit);
    now.least = scale_for(wanted.least, pass == 0 ? most.least : 0, LastScale, unit);
    const Line held{static_cast<float>(now.scale) / unit, static_cast<float>(now.least) / unit};
    now.error = 0;
    float aa = 0, ab = 0, bb = 0, ax = 0, bx = 0;  // sums over all elements x = scale * a - least * b
    for (int64_t g = 0; g < Groups; ++g) {
      const float* y = x + g * kSize;
      const auto rule_of = [&](int scale, int least) __attribute__((always_inline)) {
        const float inverse = inverse_of(held.scale * static_cast<float>(scale));
        return Rule{inverse, held.least * static_cast<float>(least) * inverse, 0, Last};
      };
      if (pass == 0) {
        now.scales[g] = nearest_multiple(lines[g].scale, held.scale, 0, LastScale);
        now.leasts[g] = nearest_multiple(lines[g].least, held.least, 0, LastScale);
      }
      const int scale = now.scales[g], least = now.leasts[g];
      float best_error = -1;
      for (int s = std::max(scale - 1, 0); s <= std::min(scale + 1, LastScale); ++s)
        for (int m = std::max(least - 1, 0); m <= std::min(least + 1, LastScale); ++m) {
          const float error =
              error_of<kSize>(y, rule_of(s, m), held.scale * static_cast<float>(s), held.least * static_cast<float>(m));
          if (best_error >= 0 && error >= best_error) continue;
          best_error = error, now.scales[g] = s, now.leasts[g] = m;
        }
      const Rule rule = rule_of(now.scales[g], now.leasts[g]);
      put_codes<kSize>(y, rule, now.codes + g * kSize);
      now.error += best_error;
      const Sums sums = sums_of<kSize>(y, rule);
      const auto s = static_cast<float>(now.scales[g]), m = static_cast<float>(now.leasts[g]);
      aa += s * s * sums.qq, ab += s * m * sums.q, bb += m * m * kSize, ax += s * sums.xq;
      for (int i = 0; i < kSize; ++i) bx += m * y[i];
    }
    if (pass > 0 && !(now.error < best.error)) break;
    best = now;
    const float determinant = aa * bb - ab * ab;
    if (determinant > 0) wanted = {(bb * ax - ab * bx) / determinant, (ab * ax - aa * bx) / determinant};
    else if (aa > 0 && bb == 0) wanted = {ax / aa, 0};
    else break;
    if (!(wanted.scale >= 0) || !(wanted.least >= 0)) break;
  }
  return best;
}

// --- without: q3_k, q6_k --------------------------------------------------------------------------------------------

/// The scale, of either sign: there is a code more below zero than above.
template <int Size, int Half> ACCELERATE_INLINE float fit_scale(const float* x, const Ranges& ranges) {
  float most = 0;
  for (int i = 0; i < Size; ++i)
    if (std::abs(x[i]) > std::abs(most)) most = x[i];
  if (most == 0) return 0;
  float best = 0, best_gain = -1;
  const auto is_better = [&](float inverse) __attribute__((always_inline)) {
    const Sums sums = sums_of<Size>(x, {inverse, 0, -Half, Half - 1});
    const float scale = sums.qq > 0 ? sums.xq / sums.qq : 0, gain = scale * sums.xq;
    if (!(gain > best_gain) || scale == 0) return false;
    best_gain = gain, best = scale;
    return true;
  };
  for (int i = 0; i < ranges.count; ++i) {
    const float inverse = (Half + ranges.offset(i)) / most;
    is_better(-inverse);
    if (Half <= 4) is_better(inverse);  // one code of eight matters; one of 64 does not
  }
  for (int i = 0; i < kRounds && best != 0; ++i)
    if (!is_better(1 / best)) break;
  return best;
}

template <int Half, int LastScale> ACCELERATE_INLINE KBlock fit_without_least(const float* from, const Ranges& ranges) {
  constexpr int kGroups = 16, kSize = kBlock / kGroups;
  float x[kBlock];
  KBlock best;
  std::fill_n(best.codes, kBlock, static_cast<uint8_t>(Half));
  const float unit = to_units(from, x);
  if (unit == 0) return best;
  float fits[kGroups], most = 0;
  for (int64_t g = 0; g < kGroups; ++g) {
    fits[g] = fit_scale<kSize, Half>(x + g * kSize, ranges);
    if (std::abs(fits[g]) > std::abs(most)) most = fits[g];
  }
  float wanted = most / (-LastScale - 1);
  KBlock now;
  for (int pass = 0; pass < 2; ++pass) {
    now.scale = scale_for(wanted, pass == 0 ? std::abs(most) : 0, LastScale + 1, unit);
    const float held = static_cast<float>(now.scale) / unit;
    now.error = 0;
    float aa = 0, ax = 0;  // sums over all elements x = scale * a
    for (int64_t g = 0; g < kGroups; ++g) {
      const float* y = x + g * kSize;
      const auto rule_of = [&](int scale) __attribute__((always_inline)) {
        return Rule{inverse_of(held * static_cast<float>(scale)), 0, -Half, Half - 1};
      };
      if (pass == 0) now.scales[g] = nearest_multiple(fits[g], held, -LastScale - 1, LastScale);
      const int scale = now.scales[g];
      float best_error = -1;
      for (int s = std::max(scale - 1, -LastScale - 1); s <= std::min(scale + 1, LastScale); ++s) {
        const float error = error_of<kSize>(y, rule_of(s), held * static_cast<float>(s), 0);
        if (best_error >= 0 && error >= best_error) continue;
        best_error = error, now.scales[g] = s;
      }
      const Rule rule = rule_of(now.scales[g]);
      put_codes<kSize>(y, rule, now.codes + g * kSize);
      now.error += best_error;
      const Sums sums = sums_of<kSize>(y, rule);
      const auto s = static_cast<float>(now.scales[g]);
      aa += s * s * sums.qq, ax += s * sums.xq;
    }
    if (pass > 0 && !(now.error < best.error)) break;
    best = now;
    if (!(aa > 0)) break;
    wanted = ax / aa;
  }
  return best;
}

// --- bytes ----------------------------------------------------------------------------------------------------------

void put_half(c10::Half half, uint8_t* to) { std::memcpy(to, &half.x, sizeof half.x); }

/// `count` bits of each code from bit `from` on, in the order that q2_k's and q3_k's codes and q6_k's upper bits have:
/// 32 bytes for 32 * (8 / count) elements.
void put_planes(const uint8_t* codes, int from, int count, uint8_t* to) {
  const int planes = 8 / count, mask = (1 << count) - 1;
  for (int i = 0; i < kBlock; ++i) {
    const int part = i / 32;
    uint8_t& byte = to[part / planes * 32 + i % 32];
    byte = static_cast<uint8_t>(byte | (codes[i] >> from & mask) << part % planes * count);
  }
}

/// The scales and least values of q4_k and q5_k, of six bits each.
void put_pairs(const KBlock& block, uint8_t* to) {
  for (int i = 0; i < 4; ++i) {
    to[i] = static_cast<uint8_t>(block.scales[i] | block.scales[i + 4] >> 4 << 6);
    to[i + 4] = static_cast<uint8_t>(block.leasts[i] | block.leasts[i + 4] >> 4 << 6);
    to[i + 8] = static_cast<uint8_t>((block.scales[i + 4] & 15) | (block.leasts[i + 4] & 15) << 4);
  }
}

/// @param b  zeros, as many as the encoding's blocks have bytes
void pack(Encoding encoding, const KBlock& block, uint8_t* b) {
  switch (encoding) {
    case Encoding::q2_k:
      for (int g = 0; g < 16; ++g) b[g] = static_cast<uint8_t>(block.scales[g] | block.leasts[g] << 4);
      put_planes(block.codes, 0, 2, b + 16);
      put_half(block.scale, b + 80);
      put_half(block.least, b + 82);
      return;
    case Encoding::q3_k:
      put_planes(block.codes, 2, 1, b);
      put_planes(block.codes, 0, 2, b + 32);
      for (int g = 0; g < 16; ++g) {
        const int scale = block.scales[g] + 32;
        b[96 + g % 8] = static_cast<uint8_t>(b[96 + g % 8] | (scale & 15) << g / 8 * 4);
        b[104 + g % 4] = static_cast<uint8_t>(b[104 + g % 4] | scale >> 4 << g / 4 * 2);
      }
      put_half(block.scale, b + 108);
      return;
    case Encoding::q4_k:
    case Encoding::q5_k:
      put_half(block.scale, b);
      put_half(block.least, b + 2);
      put_pairs(block, b + 4);
      if (encoding == Encoding::q5_k) put_planes(block.codes, 4, 1, b + 16);
      put_planes(block.codes, 0, 4, b + (encoding == Encoding::q5_k ? 48 : 16));
      return;
    default:
      for (int i = 0; i < kBlock; ++i) {  // lower bits: of four parts of 32 the first and the third share bytes
        const int part = i / 32;
        uint8_t& byte = b[part / 4 * 64 + part % 2 * 32 + i % 32];
        byte = static_cast<uint8_t>(byte | (block.codes[i] & 15) << part % 4 / 2 * 4);
      }
      put_planes(block.codes, 4, 2, b + 128);
      for (int g = 0; g < 16; ++g) b[192 + g] = static_cast<uint8_t>(static_cast<int8_t>(block.scales[g]));
      put_half(block.scale, b + 208);
  }
}

ACCELERATE_INLINE KBlock fit(Encoding encoding, const float* from) {
  switch (encoding) {
    case Encoding::q2_k:
      return fit_with_least<16, 3, 15>(from, {.count = 4, .inner = 2, .step = 0.25F});
    case Encoding::q3_k:
      return fit_without_least<4, 31>(from, {.count = 9, .inner = 3, .step = 0.15F});
    case Encoding::q4_k:
      return fit_with_least<8, 15, 63>(from, {.count = 5, .inner = 2, .step = 0.35F});
    case Encoding::q5_k:
      return fit_with_least<8, 31, 63>(from, {.count = 5, .inner = 2, .step = 0.35F});
    default:
      return fit_without_least<32, 127>(from, {.count = 13, .inner = 4, .step = 0.5F});
  }
}

ACCELERATE_INLINE void encode_all(Encoding encoding, const float* from, int64_t blocks, uint8_t* to) {
  const int64_t bytes = gguf_encoding(encoding).block_bytes;
  for (int64_t i = 0; i < blocks; ++i, from += kBlock, to += bytes) {
    std::memset(to, 0, static_cast<size_t>(bytes));
    pack(encoding, fit(encoding, from), to);
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void encode_with_avx2(Encoding encoding, const float* from, int64_t blocks,
                                                      uint8_t* to) {
  encode_all(encoding, from, blocks, to);
}
#endif
void encode_plainly(Encoding encoding, const float* from, int64_t blocks, uint8_t* to) {
  encode_all(encoding, from, blocks, to);
}

}  // namespace

void encode_k_blocks(Encoding encoding, const float* from, int64_t blocks, uint8_t* to, bool with_avx2) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (with_avx2 && has_avx2) return encode_with_avx2(encoding, from, blocks, to);
#endif
  encode_plainly(encoding, from, blocks, to);
}

}  // namespace accelerate::codes
