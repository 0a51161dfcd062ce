#include "optim/kernels/step.hpp"

#include <ATen/Version.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "accelerate/utils/error.hpp"
#include "optim/kernels/step_loops.hpp"
#include "snapshot/ledger.hpp"
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
/// @param each    of elements `from` to `from + count` of a slice: (its number, from, count)
/// @param blocks  always in blocks, also where nothing is converted
template <class Each> void each_stretch(const std::vector<StepSlice>& slices, bool blocks, const Each& each) {
  int64_t all = 0;
  for (const auto& slice : slices) all += slice.count;
  parallel_ranges(all, kGrain, [&](int64_t begin, int64_t end) {
    int64_t before = 0;
    for (size_t number = 0; number < slices.size(); ++number) {
      const auto& slice = slices[number];
      const int64_t last = std::min(end - before, slice.count);
      const int64_t at_once = blocks || is_converted(slice) ? kBlock : slice.count;
      for (int64_t from = std::max<int64_t>(begin - before, 0); from < last; from += at_once) {
        const int64_t count = std::min(at_once, last - from);
        each(number, from, count);
      }
      before += slice.count;
      if (before >= end) break;
    }
  });
}

/// f(begin, bytes) of elements `from` to `from + count` of each thing that a step rewrites.
template <class F> void each_rewritten(const StepSlice& s, int64_t from, int64_t count, const F& f) {
  const auto give = [&](const void* all, at::ScalarType type) {
    const auto size = static_cast<int64_t>(c10::elementSize(type));
    if (all) f(static_cast<const char*>(all) + from * size, count * size);
  };
  give(s.parameter, s.parameter_type);
  for (const void* state : {s.first, s.second, s.largest}) give(state, s.state_type);
}

/// The old values that a save behind training still has to read.
class OldValues {
 public:
  explicit OldValues(const std::vector<StepSlice>& slices) {
    for (const auto& slice : slices)
      each_rewritten(slice, 0, slice.count, [this](const void* begin, int64_t bytes) { keeping_.add(begin, bytes); });
  }
  bool any() const { return keeping_.any(); }
  /// Before a step on a block, which finds it in the cache then.
  void stream(const StepSlice& slice, int64_t from, int64_t count) const {
    each_rewritten(slice, from, count, [this](const void* begin, int64_t bytes) { keeping_.stream(begin, bytes); });
    snapshot::Keeping::fence();
  }

 private:
  snapshot::Keeping keeping_;
};

template <class OfFloats, class OfDoubles>
void step_on_all(const std::vector<StepSlice>& slices, double divisor, const OfFloats& of_floats,
                 const OfDoubles& of_doubles) {
  const OldValues old(slices);
  each_stretch(slices, old.any(), [&](size_t number, int64_t from, int64_t count) {
    const auto& slice = slices[number];
    if (old.any()) old.stream(slice, from, count);
    if (slice.parameter_type == at::kDouble) step_on<double>(slice, from, count, divisor, of_doubles);
    else step_on<float>(slice, from, count, divisor, of_floats);
  });
}

/// A block of gradients as a step uses them; where they lie they stay.
template <class T> class Divided {
 public:
  Divided(const StepSlice& s, int64_t from, int64_t count, double divisor)
      : gradient_(s.gradient, s.gradient_type, from, count, /*writes=*/false), data_(gradient_.data()) {
    if (divisor == 1) return;
    std::copy_n(data_, count, block_);
    loops_of<T>().divide(block_, count, static_cast<T>(divisor));
    data_ = block_;
  }
  const T* data() const { return data_; }

 private:
  Numbers<T> gradient_;
  const T* data_;
  T block_[kBlock];
};

/// The digests of all slices, to which threads add.
class Digests {
 public:
  explicit Digests(size_t slices) : all_(slices) {}
  template <class T> void add(size_t number, const T* parameter, const T* gradient, int64_t from, int64_t count) {
    const auto& digest = loops_of<T>().digest;
    std::atomic_ref(all_[number].parameter).fetch_add(digest(parameter, count, from), std::memory_order_relaxed);
    std::atomic_ref(all_[number].gradient).fetch_add(digest(gradient, count, from), std::memory_order_relaxed);
  }
  std::vector<StepDigest> take() { return std::move(all_); }

 private:
  std::vector<StepDigest> all_;
};

/// As step_on(), of a block: its old values go ahead and become new ones there.
template <class T, class Body>
void step_on_ahead(const StepSlice& s, const SliceAhead& ahead, size_t number, int64_t from, int64_t count,
                   double divisor, const Body& body, Digests& digests) {
  const auto copy = [&](const void* old, void* fresh, at::ScalarType type) {
    const auto size = static_cast<int64_t>(c10::elementSize(type));
    if (fresh && fresh != old)
      std::memcpy(static_cast<char*>(fresh) + from * size, static_cast<const char*>(old) + from * size,
                  static_cast<size_t>(count * size));
  };
  copy(s.parameter, ahead.parameter, s.parameter_type);
  copy(s.first, ahead.first, s.state_type);
  copy(s.second, ahead.second, s.state_type);
  copy(s.largest, ahead.largest, s.state_type);
  const Divided<T> gradient(s, from, count, divisor);
  const Numbers<T> parameter(ahead.parameter, s.parameter_type, from, count, true),
      first(ahead.first, s.state_type, from, count, true), second(ahead.second, s.state_type, from, count, true),
      largest(ahead.largest, s.state_type, from, count, true);
  digests.add<T>(number, parameter.data(), gradient.data(), from, count);
  body(parameter.data(), gradient.data(), first.data(), second.data(), largest.data(), count);
}

template <class OfFloats, class OfDoubles>
std::vector<StepDigest> step_ahead_on_all(const std::vector<StepSlice>& slices, const std::vector<SliceAhead>& ahead,
                                          double divisor, const OfFloats& of_floats, const OfDoubles& of_doubles) {
  for (size_t i = 0; i < slices.size(); ++i) {  // memory that was exchanged for it may be a save's still
    const auto parameter = static_cast<int64_t>(c10::elementSize(slices[i].parameter_type));
    const auto state = static_cast<int64_t>(c10::elementSize(slices[i].state_type));
    if (ahead[i].parameter) snapshot::keep(ahead[i].parameter, slices[i].count * parameter);
    for (const void* fresh : {ahead[i].first, ahead[i].second, ahead[i].largest})
      if (fresh) snapshot::keep(fresh, slices[i].count * state);
  }
  Digests digests(slices.size());
  each_stretch(slices, /*blocks=*/true, [&](size_t number, int64_t from, int64_t count) {
    const auto& slice = slices[number];
    if (slice.parameter_type == at::kDouble)
      step_on_ahead<double>(slice, ahead[number], number, from, count, divisor, of_doubles, digests);
    else step_on_ahead<float>(slice, ahead[number], number, from, count, divisor, of_floats, digests);
  });
  return digests.take();
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

std::vector<StepDigest> step_ahead(const AdamStep& rule, const std::vector<StepSlice>& slices,
                                   const std::vector<SliceAhead>& ahead, double divisor) {
  return step_ahead_on_all(slices, ahead, divisor, body_of<float>(rule), body_of<double>(rule));
}
std::vector<StepDigest> step_ahead(const SgdStep& rule, const std::vector<StepSlice>& slices,
                                   const std::vector<SliceAhead>& ahead, double divisor) {
  return step_ahead_on_all(slices, ahead, divisor, body_of<float>(rule), body_of<double>(rule));
}
std::vector<StepDigest> step_ahead(const AdagradStep& rule, const std::vector<StepSlice>& slices,
                                   const std::vector<SliceAhead>& ahead, double divisor) {
  return step_ahead_on_all(slices, ahead, divisor, body_of<float>(rule), body_of<double>(rule));
}
std::vector<StepDigest> step_ahead(const LionStep& rule, const std::vector<StepSlice>& slices,
                                   const std::vector<SliceAhead>& ahead, double divisor) {
  return step_ahead_on_all(slices, ahead, divisor, body_of<float>(rule), body_of<double>(rule));
}

std::vector<StepDigest> digests(const std::vector<StepSlice>& slices, double divisor) {
  Digests digests(slices.size());
  each_stretch(slices, /*blocks=*/true, [&](size_t number, int64_t from, int64_t count) {
    const auto add = [&]<class T>() {
      const auto& s = slices[number];
      const Numbers<T> parameter(s.parameter, s.parameter_type, from, count, /*writes=*/false);
      digests.add<T>(number, parameter.data(), Divided<T>(s, from, count, divisor).data(), from, count);
    };
    if (slices[number].parameter_type == at::kDouble) add.template operator()<double>();
    else add.template operator()<float>();
  });
  return digests.take();
}

void divide_gradients(const std::vector<StepSlice>& slices, double divisor) {
  each_stretch(slices, /*blocks=*/true, [&](size_t number, int64_t from, int64_t count) {
    const auto divide = [&]<class T>() {
      const auto& s = slices[number];
      const Numbers<T> gradient(s.gradient, s.gradient_type, from, count, /*writes=*/true);
      loops_of<T>().divide(gradient.data(), count, static_cast<T>(divisor));
    };
    if (slices[number].parameter_type == at::kDouble) divide.template operator()<double>();
    else divide.template operator()<float>();
  });
}

}  // namespace accelerate::optim::kernels
