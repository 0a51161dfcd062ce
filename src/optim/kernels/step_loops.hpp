#pragma once

#include <cstdint>

namespace accelerate::optim::kernels {

/// The numbers that are the same for all elements in one step of Adam or AdamW.
template <class T> struct AdamRates {
  T shrink;           ///< a parameter is multiplied by it: AdamW's weight decay
  T l2;               ///< times the parameter is added to its gradient: Adam's
  T keep[2], add[2];  ///< of the moments: beta and 1 - beta
  T size, eps;        ///< parameter -= size * first / (sqrt(second) + eps), where both make up for the first steps
};
template <class T> struct SgdRates {
  T lr, l2, keep, add;  ///< of the momentum buffer: momentum and 1 - dampening
  bool has_momentum, first, nesterov;
};
template <class T> struct AdagradRates { T lr, l2, eps; };
template <class T> struct LionRates {
  T shrink;           ///< as AdamRates'
  T keep[2], add[2];  ///< of the mean whose sign is the direction, and of the momentum: beta and 1 - beta
  T lr;
};

/// Loops over elements, compiled once per instruction set, with additions and multiplications that are rounded one by
/// one: an element's bits depend neither on the set nor on where a slice begins or ends. Pointers don't overlap.
template <class T> struct StepLoops {
  /// @param largest  null: not AMSGrad
  void (*adam)(T* parameter, const T* gradient, T* first, T* second, T* largest, int64_t count,
               const AdamRates<T>& rates);
  /// @param momentum  null where there is none
  void (*sgd)(T* parameter, const T* gradient, T* momentum, int64_t count, const SgdRates<T>& rates);
  void (*adagrad)(T* parameter, const T* gradient, T* sum, int64_t count, const AdagradRates<T>& rates);
  void (*lion)(T* parameter, const T* gradient, T* momentum, int64_t count, const LionRates<T>& rates);
  void (*divide)(T* values, int64_t count, T by);
  /// A sum of the elements' bits, each by a weight of its place. @param place  of the first one
  uint64_t (*digest)(const T* values, int64_t count, int64_t place);
};
/// Numbers of 16 bits, by kBf16 and kFp16: to and from fp32, ties to even.
constexpr int kBf16 = 0, kFp16 = 1;
struct AllLoops {
  StepLoops<float> of_floats;
  StepLoops<double> of_doubles;
  void (*widen[2])(const uint16_t* from, float* to, int64_t count);
  void (*narrow[2])(const float* from, uint16_t* to, int64_t count);
};

const AllLoops& plain_loops();
/// Null where the compiler or the processor has no such instructions.
const AllLoops* avx2_loops();
const AllLoops* avx512_loops();

}  // namespace accelerate::optim::kernels
