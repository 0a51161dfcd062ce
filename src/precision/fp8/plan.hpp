#pragma once

#include <optional>

#include "accelerate/codes/float8.hpp"
#include "accelerate/precision/fp8.hpp"

namespace accelerate::fp8 {

/// The source of a scale, and the number of values that it is for.
enum class Scaling {
  none,     ///< high precision: no codes
  delayed,  ///< one per tensor, from the history of its amax
  tensor,   ///< one per tensor, from its amax
  row,      ///< one per row of what is summed over
  block,    ///< MXFP8: a power of two for 32 values of what is summed over
};

/// How one operand of one product becomes codes.
struct Cast {
  Scaling scaling = Scaling::none;
  codes::Float8 format = codes::Float8::e4m3;
  bool power_of_two = false;

  /// Codes don't depend on which dimension is summed over: those of one product serve another one.
  bool for_all_products() const { return scaling == Scaling::delayed || scaling == Scaling::tensor; }
  bool operator==(const Cast&) const = default;
};

/// The operands of a layer's three products, which sum over inputs, outputs and rows of x.
struct ProductPlan {
  Cast x, w;                     ///< y = x w^T
  Cast g_for_x, w_for_x;         ///< gradient of x = g w
  Cast g_for_w, x_for_w;         ///< gradient of w = g^T x
  bool rounds_gradient = false;  ///< of the weight, to E4M3 (MS-AMP)
  bool pads = true;              ///< else what is summed over has to be a multiple of 16

  bool is_delayed() const {
    for (const Cast* cast : {&x, &w, &g_for_x, &w_for_x, &g_for_w, &x_for_w})
      if (cast->scaling == Scaling::delayed) return true;
    return false;
  }
};

ProductPlan plan_of(const FP8Recipe& recipe);
/// The format of weights and activations, and that of gradients.
codes::Float8 forward_format(const FP8Recipe& recipe);
codes::Float8 backward_format(const FP8Recipe& recipe);

}  // namespace accelerate::fp8
