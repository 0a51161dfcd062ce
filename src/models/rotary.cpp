#include "models/rotary.hpp"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/stack.h>

#include <numbers>

#include "accelerate/models/llama.hpp"

namespace accelerate::models::detail {

Rotary::Rotary(const at::Tensor& positions, const at::Tensor& frequencies, at::ScalarType dtype, Pairs pairs) : pairs_(pairs) {
  const auto angles = (positions.to(at::kFloat).unsqueeze(-1) * frequencies).unsqueeze(1);
  const auto cos = angles.cos().to(dtype), sin = angles.sin().to(dtype);
  if (pairs == Pairs::halves) {
    cos_ = at::cat({cos, cos}, -1);
    sin_ = at::cat({-sin, sin}, -1);
  } else {
    cos_ = at::stack({cos, cos}, -1).flatten(-2);
    sin_ = at::stack({-sin, sin}, -1).flatten(-2);
  }
}

at::Tensor Rotary::turn(const at::Tensor& x) const {
  const int64_t n = cos_.size(-1);
  if (n < x.size(-1)) return at::cat({turn(x.narrow(-1, 0, n)), x.narrow(-1, n, x.size(-1) - n)}, -1);
  at::Tensor partners;
  if (pairs_ == Pairs::halves) {
    partners = at::cat({x.narrow(-1, n / 2, n / 2), x.narrow(-1, 0, n / 2)}, -1);
  } else {
    const auto pairs = x.unflatten(-1, {-1, 2});
    partners = at::stack({pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
  }
  return at::addcmul(x * cos_, partners, sin_);
}

at::Tensor rotary_frequencies(int64_t n, double base, const at::Device& device) {
  const auto exponents = at::arange(0, n, 2, at::TensorOptions().dtype(at::kFloat).device(device)) / static_cast<double>(n);
  return 1.0 / at::pow(base, exponents);
}

at::Tensor rotary_frequencies(int64_t n, double base, const LlamaRopeScaling& scaling, const at::Device& device) {
  const auto plain = rotary_frequencies(n, base, device);
  if (scaling.type == "default") return plain;
  const auto slow = plain / scaling.factor;
  if (scaling.type == "linear") return slow;
  const auto waves = static_cast<double>(scaling.original_max_position_embeddings) * plain / (2 * std::numbers::pi);  // periods within the original context
  const auto share = ((waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1);
  return (1 - share) * slow + share * plain;
}

at::Tensor positions_from(int64_t past, int64_t tokens, const at::Device& device) {
  return at::arange(past, past + tokens, at::TensorOptions().dtype(at::kLong).device(device)).unsqueeze(0);
}

}  // namespace accelerate::models::detail
