#pragma once

/// The bodies of AllLoops, for the compiler to turn into vectors. Each file that includes this is compiled for another
/// instruction set, so that nothing here may have a name that two of them share.

#include <bit>
#include <cstdint>
#include <type_traits>

#include "optim/kernels/step_loops.hpp"

namespace accelerate::optim::kernels {
namespace {

float square_root(float x) { return __builtin_sqrtf(x); }
double square_root(double x) { return __builtin_sqrt(x); }

/// Whether the processor is to be told what is read later. Divisions and roots fill the window of some, which then see
/// too little of what is next; AMD's see it by themselves, and asking costs them a seventh of the time.
bool asks_ahead() {
#if defined(__x86_64__)
  static const bool asks = !__builtin_cpu_is("amd");
  return asks;
#else
  return true;
#endif
}

/// Elements `i` to `end` of all arrays, a line of the cache after the other.
template <auto kEach, class T, class Rates, class... Pointers>
void by_lines(int64_t count, const Rates& given, Pointers*... arrays) {
  constexpr int64_t kLine = 64 / sizeof(T), kAhead = 16 * kLine;
  const Rates rates = given;
  int64_t i = 0;
  if (!asks_ahead()) return kEach(i, count, rates, arrays...);
  for (; i + kLine <= count; i += kLine) {
    (__builtin_prefetch(arrays + i + kAhead, std::is_const_v<Pointers> ? 0 : 1), ...);
    kEach(i, i + kLine, rates, arrays...);
  }
  kEach(i, count, rates, arrays...);
}

template <class T, bool kL2, bool kAmsgrad>
inline void adam_each(int64_t i, int64_t end, const AdamRates<T>& rates, T* __restrict parameter,
                      const T* __restrict gradient, T* __restrict first, T* __restrict second, T* __restrict largest) {
  for (; i < end; ++i) {
    const T p = parameter[i] * rates.shrink;
    const T g = kL2 ? gradient[i] + rates.l2 * parameter[i] : gradient[i];
    const T m = rates.keep[0] * first[i] + rates.add[0] * g;
    const T v = rates.keep[1] * second[i] + rates.add[1] * (g * g);
    first[i] = m;
    second[i] = v;
    T under = v;
    if constexpr (kAmsgrad) largest[i] = under = v > largest[i] || v != v ? v : largest[i];
    parameter[i] = p - rates.size * (m / (square_root(under) + rates.eps));
  }
}

template <class T>
void adam_loop(T* parameter, const T* gradient, T* first, T* second, T* largest, int64_t count,
               const AdamRates<T>& rates) {
  const auto run = [&]<bool kL2, bool kAmsgrad>() {
    by_lines<&adam_each<T, kL2, kAmsgrad>, T>(count, rates, parameter, gradient, first, second, largest);
  };
  if (largest && rates.l2 != 0) run.template operator()<true, true>();
  else if (largest) run.template operator()<false, true>();
  else if (rates.l2 != 0) run.template operator()<true, false>();
  else run.template operator()<false, false>();
}

template <class T, bool kL2, bool kFirst, bool kNesterov>
inline void momentum_each(int64_t i, int64_t end, const SgdRates<T>& rates, T* __restrict parameter,
                          const T* __restrict gradient, T* __restrict momentum) {
  for (; i < end; ++i) {
    const T g = kL2 ? gradient[i] + rates.l2 * parameter[i] : gradient[i];
    const T m = kFirst ? g : rates.keep * momentum[i] + rates.add * g;
    momentum[i] = m;
    parameter[i] -= rates.lr * (kNesterov ? g + rates.keep * m : m);
  }
}

template <class T, bool kL2>
inline void sgd_each(int64_t i, int64_t end, const SgdRates<T>& rates, T* __restrict parameter,
                     const T* __restrict gradient) {
  for (; i < end; ++i) parameter[i] -= rates.lr * (kL2 ? gradient[i] + rates.l2 * parameter[i] : gradient[i]);
}

template <class T, bool kL2>
void sgd_with(T* parameter, const T* gradient, T* momentum, int64_t count, const SgdRates<T>& rates) {
  const auto run = [&]<auto kEach>(auto*... arrays) { by_lines<kEach, T>(count, rates, arrays...); };
  if (!rates.has_momentum) run.template operator()<&sgd_each<T, kL2>>(parameter, gradient);
  else if (rates.nesterov && rates.first)
    run.template operator()<&momentum_each<T, kL2, true, true>>(parameter, gradient, momentum);
  else if (rates.nesterov) run.template operator()<&momentum_each<T, kL2, false, true>>(parameter, gradient, momentum);
  else if (rates.first) run.template operator()<&momentum_each<T, kL2, true, false>>(parameter, gradient, momentum);
  else run.template operator()<&momentum_each<T, kL2, false, false>>(parameter, gradient, momentum);
}

template <class T>
void sgd_loop(T* parameter, const T* gradient, T* momentum, int64_t count, const SgdRates<T>& rates) {
  (rates.l2 != 0 ? &sgd_with<T, true> : &sgd_with<T, false>)(parameter, gradient, momentum, count, rates);
}

template <class T, bool kL2>
inline void adagrad_each(int64_t i, int64_t end, const AdagradRates<T>& rates, T* __restrict parameter,
                         const T* __restrict gradient, T* __restrict sum) {
  for (; i < end; ++i) {
    const T g = kL2 ? gradient[i] + rates.l2 * parameter[i] : gradient[i];
    const T s = sum[i] + g * g;
    sum[i] = s;
    parameter[i] -= rates.lr * (g / (square_root(s) + rates.eps));
  }
}

template <class T>
void adagrad_loop(T* parameter, const T* gradient, T* sum, int64_t count, const AdagradRates<T>& rates) {
  if (rates.l2 != 0) by_lines<&adagrad_each<T, true>, T>(count, rates, parameter, gradient, sum);
  else by_lines<&adagrad_each<T, false>, T>(count, rates, parameter, gradient, sum);
}

template <class T>
inline void lion_each(int64_t i, int64_t end, const LionRates<T>& rates, T* __restrict parameter,
                      const T* __restrict gradient, T* __restrict momentum) {
  for (; i < end; ++i) {
    const T g = gradient[i], m = momentum[i];
    const T mean = rates.keep[0] * m + rates.add[0] * g;
    // Zero has none, and NaN stays NaN.
    const T sign = mean > 0 ? T(1) : mean < 0 ? T(-1) : mean;
    momentum[i] = rates.keep[1] * m + rates.add[1] * g;
    parameter[i] = parameter[i] * rates.shrink - rates.lr * sign;
  }
}

template <class T>
void lion_loop(T* parameter, const T* gradient, T* momentum, int64_t count, const LionRates<T>& rates) {
  by_lines<&lion_each<T>, T>(count, rates, parameter, gradient, momentum);
}

template <class T> void divide_loop(T* values, int64_t count, T by) {
  for (int64_t i = 0; i < count; ++i) values[i] /= by;
}

template <class T> uint64_t digest_loop(const T* values, int64_t count, int64_t place) {
  constexpr uint32_t kSpread = 2654435761U;  // 2^32 by the golden ratio: neighbours' weights have nothing in common
  const auto before = static_cast<uint32_t>(place);
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    // Odd, so that no change of an element is multiplied by 0.
    const uint32_t weight = ((before + static_cast<uint32_t>(i)) * kSpread) | 1U;
    if constexpr (sizeof(T) == sizeof(uint32_t)) {
      sum += static_cast<uint64_t>(std::bit_cast<uint32_t>(values[i])) * weight;
    } else {
      const auto bits = std::bit_cast<uint64_t>(values[i]);
      sum += (bits & 0xffffffffU) * weight + (bits >> 32) * (static_cast<uint64_t>(weight) << 1 | 1U);
    }
  }
  return sum;
}

// Masks in place of conditions, of which the compiler makes branches and no vectors.
constexpr uint32_t choose(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }
constexpr uint32_t mask_of(bool condition) { return 0U - static_cast<uint32_t>(condition); }

void widen_bf16(const uint16_t* __restrict from, float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i]) << 16);
}

void narrow_bf16(const float* __restrict from, uint16_t* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(from[i]);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    to[i] = static_cast<uint16_t>(choose(mask_of((bits & 0x7fffffff) > 0x7f800000), 0x7fc0, rounded));
  }
}

constexpr uint32_t kRebias = 112U << 23;  ///< from fp16's exponents to fp32's
constexpr uint32_t kSmallestNormal = 113U << 23;

void widen_fp16(const uint16_t* __restrict from, float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = (from[i] & 0x7fffU) << 13, sign = (from[i] & 0x8000U) << 16;
    // Numbers below the smallest normal one: the fraction of a power of two, which is taken away again. No fp32 number
    // here is below its own smallest normal one, which the processor may be told to take for zero.
    const float small = std::bit_cast<float>(magnitude + kSmallestNormal) - std::bit_cast<float>(kSmallestNormal);
    const uint32_t special = mask_of(magnitude >= 0x0f800000), subnormal = mask_of(magnitude < 0x00800000);
    const uint32_t normal = magnitude + choose(special, 2 * kRebias, kRebias);
    to[i] = std::bit_cast<float>(choose(subnormal, std::bit_cast<uint32_t>(small), normal) | sign);
  }
}

void narrow_fp16(const float* __restrict from, uint16_t* __restrict to, int64_t count) {
  constexpr uint32_t kGrid = 126U << 23;  // fp16's numbers below its smallest normal one are this one's last bits
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<uint32_t>(from[i]);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t subnormal = mask_of(magnitude < kSmallestNormal), special = mask_of(magnitude >= 143U << 23);
    // Others are not added to the grid: they may be NaN.
    const auto on_grid =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude & subnormal) + std::bit_cast<float>(kGrid));
    const uint32_t normal = (magnitude - kRebias + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const uint32_t beyond = choose(mask_of(magnitude > 0x7f800000), 0x7e00, 0x7c00);
    const uint32_t found = choose(special, beyond, choose(subnormal, on_grid - kGrid, normal));
    to[i] = static_cast<uint16_t>(found | (bits >> 16 & 0x8000));
  }
}

template <class T>
constexpr StepLoops<T> kLoopsOf{&adam_loop<T>, &sgd_loop<T>,    &adagrad_loop<T>,
                                &lion_loop<T>, &divide_loop<T>, &digest_loop<T>};

constexpr AllLoops kLoops{kLoopsOf<float>, kLoopsOf<double>, {&widen_bf16, &widen_fp16}, {&narrow_bf16, &narrow_fp16}};

}  // namespace
}  // namespace accelerate::optim::kernels
