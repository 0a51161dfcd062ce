#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/// Loops over rows of fp32, for processors with AVX2 and FMA: whoever calls them has asked is_supported().
namespace accelerate::models::detail {

#if defined(__x86_64__)

inline bool is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

__attribute__((target("avx2,fma"))) inline float dot(const float* a, const float* b, int64_t count) {
  // Four chains, because each step waits for the one before it in its chain.
  constexpr int64_t kLanes = 8, kChains = 4;
  __m256 sums[kChains] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes)
    for (int64_t chain = 0; chain < kChains; ++chain)
      sums[chain] = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + chain * kLanes), _mm256_loadu_ps(b + i + chain * kLanes),
                                    sums[chain]);
  float parts[kLanes];
  _mm256_storeu_ps(parts, _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
  float sum = ((parts[0] + parts[4]) + (parts[1] + parts[5])) + ((parts[2] + parts[6]) + (parts[3] + parts[7]));
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

/// to += factor * from
__attribute__((target("avx2,fma"))) inline void add_scaled(float* to, const float* from, float factor, int64_t count) {
  const auto factors = _mm256_set1_ps(factor);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_fmadd_ps(_mm256_loadu_ps(from + i), factors, _mm256_loadu_ps(to + i)));
  for (; i < count; ++i) to[i] += factor * from[i];
}

/// To 2 parts in 10 million; up to e^-87, below which it is that.
__attribute__((target("avx2,fma"))) inline __m256 exponential(__m256 x) {
  x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87)), _mm256_set1_ps(88));
  const __m256 twos = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504F)), 8);  // to the nearest
  // ln 2 in two numbers, of which the first has few digits: its products are exact.
  x = _mm256_fnmadd_ps(twos, _mm256_set1_ps(0.693359375F), x);
  x = _mm256_fnmadd_ps(twos, _mm256_set1_ps(-2.12194440e-4F), x);
  __m256 sum = _mm256_set1_ps(1.0F / 720);  // the series, for up to half of ln 2
  for (const float factor : {1.0F / 120, 1.0F / 24, 1.0F / 6, 0.5F, 1.0F, 1.0F})
    sum = _mm256_fmadd_ps(sum, x, _mm256_set1_ps(factor));
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(twos), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(sum, _mm256_castsi256_ps(exponent));
}

/// Shares from scores, in place: e^(score - largest), and what they have to be multiplied by to add up to 1.
__attribute__((target("avx2,fma"))) inline float exponentials(float* scores, int64_t count) {
  float largest = scores[0], sum = 0;
  for (int64_t i = 1; i < count; ++i) largest = std::max(largest, scores[i]);
  for (int64_t i = 0; i < count; i += 8) {
    float eight[8] = {};
    const int64_t some = std::min<int64_t>(8, count - i);
    std::copy_n(scores + i, some, eight);
    _mm256_storeu_ps(eight, exponential(_mm256_sub_ps(_mm256_loadu_ps(eight), _mm256_set1_ps(largest))));
    for (int64_t j = 0; j < some; ++j) sum += scores[i + j] = eight[j];
  }
  return 1 / sum;
}

/// gate <- gate / (1 + e^-gate) * factor
__attribute__((target("avx2,fma"))) inline void silu_times(float* gate, const float* factor, int64_t count) {
  for (int64_t i = 0; i < count; i += 8) {
    float a[8] = {}, b[8] = {};
    const int64_t some = std::min<int64_t>(8, count - i);
    std::copy_n(gate + i, some, a), std::copy_n(factor + i, some, b);
    const __m256 x = _mm256_loadu_ps(a), one = _mm256_set1_ps(1);
    const __m256 below = _mm256_add_ps(one, exponential(_mm256_sub_ps(_mm256_setzero_ps(), x)));
    _mm256_storeu_ps(a, _mm256_mul_ps(_mm256_div_ps(x, below), _mm256_loadu_ps(b)));
    std::copy_n(a, some, gate + i);
  }
}

#else

inline bool is_supported() { return false; }
inline float dot(const float*, const float*, int64_t) { return 0; }  // none of these is called
inline void add_scaled(float*, const float*, float, int64_t) {}
inline float exponentials(float*, int64_t) { return 0; }
inline void silu_times(float*, const float*, int64_t) {}

#endif

}  // namespace accelerate::models::detail
