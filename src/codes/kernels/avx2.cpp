#include "codes/kernels/product_loops.hpp"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

namespace accelerate::codes::kernels {
namespace {

/// A vector is half of the rows.
struct Avx2 {
  static constexpr int kRows = 8;
  static constexpr int kTile = 4;  // rows of x whose sums fit the registers
  static constexpr float kWideOffset = 0;
  using Bytes = __m256i;
  using Ints = __m256i;
  using Floats = __m256;
  using Small = __m128i;
  using Entries = __m256i;

  static Bytes load(const Byte* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static Small load_small(const Byte* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
  static Bytes bits(Bytes a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi8(static_cast<char>(mask))); }
  static Small bits(Small a, int mask) { return _mm_and_si128(a, _mm_set1_epi8(static_cast<char>(mask))); }
  static Bytes either(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
  static Small either(Small a, Small b) { return _mm_or_si128(a, b); }
  static Bytes right(Bytes a, int by) { return _mm256_srl_epi16(a, _mm_cvtsi32_si128(by)); }
  static Small right(Small a, int by) { return _mm_srl_epi16(a, _mm_cvtsi32_si128(by)); }
  static Bytes left(Bytes a, int by) { return _mm256_sll_epi16(a, _mm_cvtsi32_si128(by)); }
  static Entries table(const Byte* entries) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)));
  }
  static Bytes look_up(Entries entries, Bytes indices) { return _mm256_shuffle_epi8(entries, indices); }
  static Ints zero() { return _mm256_setzero_si256(); }
  /// Pairs are added in 16 bits: right for codes up to 127.
  static Ints dot(Ints sum, Bytes codes, int32_t x) {
    return _mm256_add_epi32(sum,
                            _mm256_madd_epi16(_mm256_maddubs_epi16(codes, _mm256_set1_epi32(x)), _mm256_set1_epi16(1)));
  }
  static Bytes wide(Bytes codes) { return codes; }
  /// The first factor of that instruction has no sign: the other one takes it.
  static Ints dot_wide(Ints sum, Bytes codes, int32_t x) {
    const auto pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(_mm256_set1_epi32(x), codes));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static Ints sum(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  static Ints all_ints(int32_t a) { return _mm256_set1_epi32(a); }
  static Ints times_128(Ints a) { return _mm256_slli_epi32(a, 7); }
  static Floats to_floats_of(Ints a) { return _mm256_cvtepi32_ps(a); }
  static Floats to_floats(Small a) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(a)); }
  static Floats to_signed_floats(Small a) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(a)); }
  static Floats halves(const Byte* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Floats numbers(const float* from) { return _mm256_loadu_ps(from); }
  static Floats all(float a) { return _mm256_set1_ps(a); }
  static Floats negative(Floats a) { return _mm256_sub_ps(_mm256_setzero_ps(), a); }
  static Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static void store(float* to, Floats a) { _mm256_storeu_ps(to, a); }

  static constexpr int kNumbers = 16;  // that numbers_of_halves() makes
  struct Sixteen {
    Floats first, second;
  };
  static Sixteen sixteen(const float* table, float scale) {
    return {times(numbers(table), all(scale)), times(numbers(table + 8), all(scale))};
  }
  static void numbers_of_halves(const Sixteen& values, const Byte* from, float* to) {
    const Small both = load_small(from), upper = bits(right(both, 4), 15), lower = bits(both, 15);
    const auto store_eight = [&](Small indices, float* eight) {
      const __m256i i = _mm256_cvtepu8_epi32(indices);
      // The instruction looks at three bits of an index; the fourth, moved to the sign, chooses between two of them.
      store(eight,
            _mm256_blendv_ps(_mm256_permutevar8x32_ps(values.first, i), _mm256_permutevar8x32_ps(values.second, i),
                             _mm256_castsi256_ps(_mm256_slli_epi32(i, 28))));
    };
    const Small indices = _mm_unpacklo_epi8(upper, lower);
    store_eight(indices, to);
    store_eight(_mm_srli_si128(indices, 8), to + 8);
  }

  static float quantize_part(const float* x, signed char* to, int32_t* sums) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    __m256 magnitudes = _mm256_setzero_ps(), differences = _mm256_setzero_ps();
    for (int i = 0; i < kPart; i += 8) {
      const __m256 a = _mm256_loadu_ps(x + i);
      magnitudes = _mm256_max_ps(magnitudes, _mm256_andnot_ps(sign, a));
      differences = _mm256_add_ps(differences, _mm256_sub_ps(a, a));
    }
    float lanes[16];
    _mm256_storeu_ps(lanes, magnitudes);
    _mm256_storeu_ps(lanes + 8, differences);
    float largest = 0, undefined = 0;
    for (int i = 0; i < 8; ++i) largest = lanes[i] > largest ? lanes[i] : largest, undefined += lanes[i + 8];
    const __m256 inverse = _mm256_set1_ps(largest > kSmallest && undefined == 0 ? 127 / largest : 0);
    for (int64_t half = 0; half < 2; ++half) {
      const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * half), inverse)),
                    b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16 * half + 8), inverse));
      // The packing instructions work within halves of a register: words are put in order between them.
      const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0b11011000);
      const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * half), bytes);
      int32_t both[8];
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(both), _mm256_add_epi32(a, b));
      sums[half] = 0;
      for (const int32_t sum : both) sums[half] += sum;
    }
    return largest / 127 + undefined;
  }
};

/// As tile() for nf4 and fp4: the numbers of their tables as words of 16 bits take half of the multiplications that two
/// products with bytes take. Each instruction multiplies two columns of four rows.
template <int kTile> void table_tile(const Product& p, int64_t group, int64_t first) {
  const int64_t parts = p.k / kPart, columns = p.n - group * kGroup;
  Byte low[16], high[16];
  for (int i = 0; i < 16; ++i) {
    const auto number = static_cast<uint32_t>(p.table[i] * 128 + p.table[i + 16] - 8192);
    low[i] = static_cast<Byte>(number & 255);
    high[i] = static_cast<Byte>(number >> 8 & 255);
  }
  const __m256i low_bytes = Avx2::table(low), high_bytes = Avx2::table(high);
  for (int64_t row = 0; row < kGroup && row < columns; row += Avx2::kRows) {
    __m256 total[kTile];
    for (auto& sum : total) sum = _mm256_setzero_ps();
    const Byte* block = p.codes + group * p.group_bytes;
    const float* scale = p.scales + group * kGroup * (parts / p.period) + row;
    int64_t period = 0;
    for (int64_t at = 0; at < parts; ++at, block += 256) {
      __m256i pairs[kTile], other_pairs[kTile];
      for (int r = 0; r < kTile; ++r) pairs[r] = other_pairs[r] = _mm256_setzero_si256();
      const auto add = [&](__m256i codes, int column) {
        const __m256i lower = _mm256_shuffle_epi8(low_bytes, codes), upper = _mm256_shuffle_epi8(high_bytes, codes);
        const __m256i numbers = _mm256_unpacklo_epi8(lower, upper), others = _mm256_unpackhi_epi8(lower, upper);
        ACCELERATE_UNROLL
        for (int r = 0; r < kTile; ++r) {
          long long four = 0;
          __builtin_memcpy(&four, p.words + ((first + r) * parts + at) * kPart + column, sizeof four);
          const __m256i x = _mm256_set1_epi64x(four);
          pairs[r] = _mm256_add_epi32(pairs[r], _mm256_madd_epi16(numbers, x));
          other_pairs[r] = _mm256_add_epi32(other_pairs[r], _mm256_madd_epi16(others, x));
        }
      };
      ACCELERATE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const __m256i both = line<Avx2>(block, i, row);
        add(Avx2::bits(both, 15), 4 * i);
        add(Avx2::bits(Avx2::right(both, 4), 15), 16 + 4 * i);
      }
      const __m256 scales = _mm256_loadu_ps(scale);
      ACCELERATE_UNROLL
      for (int r = 0; r < kTile; ++r) {
        const __m256 sums = _mm256_cvtepi32_ps(_mm256_hadd_epi32(pairs[r], other_pairs[r]));
        const __m256 factor = _mm256_mul_ps(scales, _mm256_set1_ps(p.input_scales[(first + r) * parts + at]));
        total[r] = _mm256_fmadd_ps(factor, sums, total[r]);
      }
      if (++period == p.period) period = 0, scale += kGroup;
    }
    for (int r = 0; r < kTile; ++r) store_columns<Avx2>(p, group, first + r, row, total[r]);
  }
}

void table_product(const Product& p, int64_t group, int64_t first, int64_t last) {
  for (; first + 4 <= last; first += 4) table_tile<4>(p, group, first);
  for (; first + 2 <= last; first += 2) table_tile<2>(p, group, first);
  for (; first < last; ++first) table_tile<1>(p, group, first);
}

constexpr InstructionSet with_table_of_words(InstructionSet set) {
  set.product[static_cast<int>(GroupForm::table)] = table_product;
  set.table_takes_words = true;
  return set;
}

constexpr InstructionSet kInstructions = with_table_of_words(instructions<Avx2>("avx2"));

}  // namespace

const InstructionSet* avx2_instructions() {
  // Not every compiler can ask for F16C, which all processors with AVX2 have.
  static const bool there = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return there ? &kInstructions : nullptr;
}

}  // namespace accelerate::codes::kernels

#else

namespace accelerate::codes::kernels {
const InstructionSet* avx2_instructions() { return nullptr; }
}  // namespace accelerate::codes::kernels

#endif
