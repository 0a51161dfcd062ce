#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>

#include "precision/fp8/plan.hpp"

namespace accelerate::fp8 {

/// A matrix [I, K] as a product sees it that sums over K: codes with scales, or the matrix itself.
struct Operand {
  at::Tensor codes;      ///< float8 [I, K]; a transposed view may be
  at::Tensor values;     ///< fp32 [I, K]: what the codes stand for, before scales; or undefined, not worked out
  at::Tensor inverse;    ///< fp32, 1 / scale: one element, or [I, 1]
  at::Tensor exponents;  ///< of MXFP8, uint8 [I, ceil(K / 32)]
  at::Tensor high;       ///< the matrix itself: high precision
  at::Tensor amax;       ///< of what was encoded, where scaling is delayed

  bool is_high() const { return high.defined(); }
  /// The operand of [K, I], for codes that serve all products.
  Operand turned() const;

  /// The tensors that have to be saved for backward, and the way back. Undefined where there is nothing.
  static constexpr size_t kSaved = 4;
  std::array<at::Tensor, kSaved> saved() const { return {codes, inverse, exponents, high}; }
  static Operand restored(const at::Tensor* saved) { return {saved[0], {}, saved[1], saved[2], saved[3], {}}; }
};

/// @param matrix  [I, K], floating; any strides
/// @param scale   of delayed scaling; one element
/// @param values  keep what the codes stand for: a product follows
Operand make_operand(const at::Tensor& matrix, const Cast& cast, const at::Tensor& scale, bool values);

/// a b^T [I, J] in `dtype`; sums are fp32. Emulates where at::_scaled_mm can't compute it. Both operands are codes, or
/// both are high. @param a  [I, K]  @param b  [J, K]
at::Tensor multiply(const Operand& a, const Operand& b, at::ScalarType dtype);

/// The two ways: by decoding codes to fp32, and by at::_scaled_mm (not for MXFP8).
at::Tensor multiply_emulated(const Operand& a, const Operand& b, at::ScalarType dtype);
at::Tensor multiply_scaled(const Operand& a, const Operand& b, at::ScalarType dtype);

/// `x` by way of codes, with a scale of its own.
at::Tensor rounded_to(const at::Tensor& x, codes::Float8 format);

}  // namespace accelerate::fp8
