#pragma once

#include <ATen/core/Tensor.h>

namespace accelerate::models {
struct LlamaRopeScaling;
}

namespace accelerate::models::detail {

/// Rotary positions: pairs of a head's dimensions are turned by angles that grow with the position. Source: arXiv:2104.09864.
/// Worked out once per forward for all layers.
class Rotary {
 public:
  enum class Pairs {
    halves,      ///< Dimension i belongs to i + n / 2.
    neighbours,  ///< Dimension 2 i belongs to 2 i + 1.
  };

  /// @param positions    [B or 1, T], of any integer dtype
  /// @param frequencies  [n / 2] in fp32: radians per position of each pair
  /// @param dtype        of what will be turned
  Rotary(const at::Tensor& positions, const at::Tensor& frequencies, at::ScalarType dtype, Pairs pairs = Pairs::halves);

  /// Turns the first n of d dimensions. @param x  [B, H, T, d]
  at::Tensor turn(const at::Tensor& x) const;

 private:
  Pairs pairs_;
  at::Tensor cos_, sin_;  ///< [B or 1, 1, T, n]; the sine of each pair's first dimension is negated
};

/// base ^ (-2 i / n) for i = 0 … n / 2 - 1: the frequencies of the source.
at::Tensor rotary_frequencies(int64_t n, double base, const at::Device& device);
/// The same for longer contexts.
at::Tensor rotary_frequencies(int64_t n, double base, const LlamaRopeScaling& scaling, const at::Device& device);

/// S, S + 1, … for T tokens: [1, T] int64.
at::Tensor positions_from(int64_t past, int64_t tokens, const at::Device& device);

}  // namespace accelerate::models::detail
