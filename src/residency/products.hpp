#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>

namespace accelerate::residency {

/// A tensor's part of the weight [n, m] over whose storage it lies: all of it, its transpose, or something else.
enum class WeightView { whole, turned, part };
WeightView weight_view(const at::Tensor& view, const at::Tensor& weight);

class OperatorCall;

/// For an operator that multiplies an input with a weight: which arguments are what.
struct ProductPlaces {
  size_t x, weight, bias;  ///< bias: kNoArgument where there is none
  bool rows;               ///< each row of the weight gives an output, as linear's; else each column
};
inline constexpr size_t kNoArgument = ~size_t{0};

/// By the operator's name, which those with out= share. Null: it is none of linear, mm, matmul and addmm, nor the one
/// row's product of accelerate::models.
const ProductPlaces* product_places(const std::string& name);

/// addmm has factors, `alpha` or `beta`, that are not 1.
bool has_other_factors(const OperatorCall& call);

/// Backward multiplies by weights, too, with the same operators; recomputed forwards run there with gradients on.
bool within_backward();

}  // namespace accelerate::residency
