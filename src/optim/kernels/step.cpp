#include "optim/kernels/step.hpp"

#include <ATen/Version.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "accelerate/utils/error.hpp"
#include "optim/kernels/step_loops.hpp"
#include "utils/parallel.hpp"

namespace accelerate::optim::kernels {
namespace {

constexpr int64_t kGrain = 1 << 15;  ///< elements that are worth a thread
constexpr int64_t kBlock = 1024;     ///< elements that are converted at a time: they stay in the first-level cache

const AllLoops& loops() {
  static const AllLoops& chosen = []() -> const AllLoops& {
    const std::string allowed = at::get_cpu_capability();
    const AllLoops* const with_512 = allowed == "AVX512" ? avx512_loops() : nullptr;
    const AllLoops* const with_256 = allowed == "AVX512" || allowed.starts_with("AVX2") ? avx2_loops() : nullptr;
    return with_512 ? *with_512 : with_256 ? *with_256 : plain_loops();
  }();
  return chosen;
}

template <class T> const StepLoops<T>& loops_of();
template <> const StepLoops<float>& loops_of() { return loops().of_floats; }
template <> const StepLoops<double>& loops_of() { return loops().of_doubles; }

int format_of(at::ScalarType type) {
  if (type == at::kBFloat16) return kBf16;
  if (type == at::kHalf) return kFp16;
  throw InternalError("step: found a tensor of a type that has no kernel");
}

/// Numbers of a slice as T: where they lie, or in a block of fp32 that goes back at the end.
template <class T> class Numbers {
 public:
  Numbers(void* all, at::ScalarType type, int64_t from, int64_t count, bool writes)
      : type_(type), count_(count), writes_(writes) {
    if (!all) return;
    if (type == c10::CppTypeToScalarType<T>::value) {
      data_ = static_cast<T*>(all) + from;
      return;
    }
    if constexpr (std::is_same_v<T, float>) {
      low_ = static_cast<uint16_t*>(all) + from;
      loops().widen[format_of(type)](low_, block_, count);
      data_ = block_;
    } else {
      throw InternalError("step: found fp64 with tensors of other types");
    }
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  ~Numbers() {
    if constexpr (std::is_same_v<T, float>)
      if (low_ && writes_) loops().narrow[format_of(type_)](block_, low_, count_);
  }
  T* data() const { return data_; }

 private:
  at::ScalarType type_;
  int64_t count_;
  bool writes_;
  T* data_ = nullptr;
  uint16_t* low_ = nullptr;
  T block_[kBlock];
};

bool is_converted(const StepSlice& slice) {
  const auto low = [](at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; };
  return low(slice.parameter_type) || low(slice.gradient_type) || low(slice.state_type);
}

/// @param body  of elements `from` to `from + count` of a slice: (parameter, gradient, first, second, largest, count)
template <class T, class Body>
void step_on(const StepSlice& s, int64_t from, int64_t count, double divisor, const Body& body) {
  const Numbers<T> parameter(s.parameter, s.parameter_type, from, count, true),
      gradient(s.gradient, s.gradient_type, from, count, divisor != 1), first(s.first, s.state_type, from, count, true),
      second(s.second, s.state_type, from, count, true), largest(s.largest, s.state_type, from, count, true);
  if (divisor != 1) loops_of<T>().divide(gradient.data(), count, static_cast<T>(divisor));
  body(parameter.data(), gradient.data(), first.data(), second.data(), largest.data(), count);
}

/// Element after element of all slices, as if they were one.
template <class OfFloats, class OfDoubles>
void step_on_all(const std::vector<StepSlice>& slices, double divisor, const OfFloats& of_floats,
                 const OfDoubles& of_doubles) {
  int64_t all = 0;
  for (const auto& slice : slices) all += slice.count;
  parallel_ranges(all, kGrain, [&](int64_t begin, int64_t end) {
    int64_t before = 0;
    for (const auto& slice : slices) {
      const int64_t last = std::min(end - before, slice.count);
      const int64_t at_once = is_converted(slice) ? kBlock : slice.count;
      for (int64_t from = std::max<int64_t>(begin - before, 0); from < last; from += at_once) {
        const int64_t count = std::min(at_once, last - from);
        if (slice.parameter_type == at::kDouble) step_on<double>(slice, from, count, divisor, of_doubles);
        else step_on<float>(slice, from, count, divisor, of_floats);
      }
      before += slice.count;
      if (before >= end) break;
    }
  });
}

template <class T> AdamRates<T> rates_of(const AdamStep& rule) {
  const auto number = static_cast<double>(rule.step);
  // lr / (1 - beta1^n) * first / (sqrt(second) / root + eps), with one division less.
  const double root = rule.bias_correction ? std::sqrt(1 - std::pow(rule.beta2, number)) : 1;
  const double rest = rule.bias_correction ? 1 - std::pow(rule.beta1, number) : 1;
  return {.shrink = static_cast<T>(rule.decoupled ? 1 - rule.lr * rule.weight_decay : 1),
          .l2 = static_cast<T>(rule.decoupled ? 0 : rule.weight_decay),
          .keep = {static_cast<T>(rule.beta1), static_cast<T>(rule.beta2)},
          .add = {static_cast<T>(1 - rule.beta1), static_cast<T>(1 - rule.beta2)},
          .size = static_cast<T>(rule.lr * root / rest),
          .eps = static_cast<T>(rule.eps * root)};
}
template <class T> SgdRates<T> rates_of(const SgdStep& rule) {
  return {.lr = static_cast<T>(rule.lr),
          .l2 = static_cast<T>(rule.weight_decay),
          .keep = static_cast<T>(rule.momentum),
          .add = static_cast<T>(1 - rule.dampening),
          .has_momentum = rule.momentum != 0,
          .first = rule.first,
          .nesterov = rule.nesterov};
}
template <class T> AdagradRates<T> rates_of(const AdagradStep& rule) {
  return {.lr = static_cast<T>(rule.lr / (1 + static_cast<double>(rule.step - 1) * rule.lr_decay)),
          .l2 = static_cast<T>(rule.weight_decay),
          .eps = static_cast<T>(rule.eps)};
}
template <class T> LionRates<T> rates_of(const LionStep& rule) {
  return {.shrink = static_cast<T>(1 - rule.lr * rule.weight_decay),
          .keep = {static_cast<T>(rule.beta1), static_cast<T>(rule.beta2)},
          .add = {static_cast<T>(1 - rule.beta1), static_cast<T>(1 - rule.beta2)},
          .lr = static_cast<T>(rule.lr)};
}

template <class T> auto body_of(const AdamStep& rule) {
  return [rates = rates_of<T>(rule)](T* p, const T* g, T* m, T* v, T* largest, int64_t n) {
    loops_of<T>().adam(p, g, m, v, largest, n, rates);
  };
}
template <class T> auto body_of(const SgdStep& rule) {
  return [rates = rates_of<T>(rule)](T* p, const T* g, T* momentum, T*, T*, int64_t n) {
    loops_of<T>().sgd(p, g, momentum, n, rates);
  };
}
template <class T> auto body_of(const AdagradStep& rule) {
  return [rates = rates_of<T>(rule)](T* p, const T* g, T* sum, T*, T*, int64_t n) {
    loops_of<T>().adagrad(p, g, sum, n, rates);
  };
}
template <class T> auto body_of(const LionStep& rule) {
  return [rates = rates_of<T>(rule)](T* p, const T* g, T* momentum, T*, T*, int64_t n) {
    loops_of<T>().lion(p, g, momentum, n, rates);
  };
}

}  // namespace

void step(const AdamStep& rule, const std::vector<StepSlice>& slices, double divisor) {
  step_on_all(slices, divisor, body_of<float>(rule), body_of<double>(rule));
}
void step(const SgdStep& rule, const std::vector<StepSlice>& slices, double divisor) {
  step_on_all(slices, divisor, body_of<float>(rule), body_of<double>(rule));
}
void step(const AdagradStep& rule, const std::vector<StepSlice>& slices, double divisor) {
  step_on_all(slices, divisor, body_of<float>(rule), body_of<double>(rule));
}
void step(const LionStep& rule, const std::vector<StepSlice>& slices, double divisor) {
  step_on_all(slices, divisor, body_of<float>(rule), body_of<double>(rule));
}

}  // namespace accelerate::optim::kernels
