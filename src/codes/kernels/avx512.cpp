#include "codes/kernels/product_loops.hpp"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#include <immintrin.h>

namespace accelerate::codes::kernels {
namespace {

/// A vector is all 16 rows.
struct Avx512 {
  static constexpr int kRows = 16;
  static constexpr int kTile = 8;            // rows of x whose sums fit the registers, beside the codes
  static constexpr float kWideOffset = 128;  // the instruction takes codes without a sign
  using Bytes = __m512i;
  using Ints = __m512i;
  using Floats = __m512;
  using Small = __m128i;
  using Entries = __m512i;

  static Bytes load(const Byte* from) { return _mm512_loadu_si512(from); }
  static Small load_small(const Byte* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static Bytes bits(Bytes a, int mask) { return _mm512_and_si512(a, _mm512_set1_epi8(static_cast<char>(mask))); }
  static Small bits(Small a, int mask) { return _mm_and_si128(a, _mm_set1_epi8(static_cast<char>(mask))); }
  static Bytes either(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }
  static Small either(Small a, Small b) { return _mm_or_si128(a, b); }
  static Bytes right(Bytes a, int by) { return _mm512_srl_epi16(a, _mm_cvtsi32_si128(by)); }
  static Small right(Small a, int by) { return _mm_srl_epi16(a, _mm_cvtsi32_si128(by)); }
  static Bytes left(Bytes a, int by) { return _mm512_sll_epi16(a, _mm_cvtsi32_si128(by)); }
  static Entries table(const Byte* entries) { return _mm512_broadcast_i32x4(load_small(entries)); }
  static Bytes look_up(Entries entries, Bytes indices) { return _mm512_shuffle_epi8(entries, indices); }
  static Ints zero() { return _mm512_setzero_si512(); }
  static Ints dot(Ints sum, Bytes codes, int32_t x) { return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(x)); }
  static Bytes wide(Bytes codes) { return _mm512_xor_si512(codes, _mm512_set1_epi8(-128)); }
  static Ints dot_wide(Ints sum, Bytes codes, int32_t x) { return dot(sum, codes, x); }
  static Ints sum(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Ints all_ints(int32_t a) { return _mm512_set1_epi32(a); }
  static Ints times_128(Ints a) { return _mm512_slli_epi32(a, 7); }
  static Floats to_floats_of(Ints a) { return _mm512_cvtepi32_ps(a); }
  static Floats to_floats(Small a) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(a)); }
  static Floats to_signed_floats(Small a) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(a)); }
  static Floats halves(const Byte* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Floats numbers(const float* from) { return _mm512_loadu_ps(from); }
  static Floats all(float a) { return _mm512_set1_ps(a); }
  static Floats negative(Floats a) { return _mm512_sub_ps(_mm512_setzero_ps(), a); }
  static Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static void store(float* to, Floats a) { _mm512_storeu_ps(to, a); }

  static constexpr int kNumbers = 32;  // that numbers_of_halves() makes
  static Floats sixteen(const float* table, float scale) { return _mm512_mul_ps(_mm512_loadu_ps(table), all(scale)); }
  static void numbers_of_halves(Floats values, const Byte* from, float* to) {
    const Small both = load_small(from), upper = bits(right(both, 4), 15), lower = bits(both, 15);
    const auto look_up_in = [&](Small indices) { return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(indices), values); };
    store(to, look_up_in(_mm_unpacklo_epi8(upper, lower)));
    store(to + 16, look_up_in(_mm_unpackhi_epi8(upper, lower)));
  }

  static float quantize_part(const float* x, signed char* to, int32_t* sums) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const float undefined = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_sub_ps(a, a), _mm512_sub_ps(b, b)));
    const __m512 inverse = _mm512_set1_ps(largest > kSmallest && undefined == 0 ? 127 / largest : 0);
    const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)),
                  qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(qa));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm512_cvtsepi32_epi8(qb));
    sums[0] = _mm512_reduce_add_epi32(qa);
    sums[1] = _mm512_reduce_add_epi32(qb);
    return largest / 127 + undefined;
  }
};

constexpr InstructionSet kInstructions = instructions<Avx512>("avx512");

}  // namespace

const InstructionSet* avx512_instructions() {
  static const bool there = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vnni");
  return there ? &kInstructions : nullptr;
}

}  // namespace accelerate::codes::kernels

#else

namespace accelerate::codes::kernels {
const InstructionSet* avx512_instructions() { return nullptr; }
}  // namespace accelerate::codes::kernels

#endif
