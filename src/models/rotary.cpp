#include "models/rotary.hpp"

#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "accelerate/models/llama.hpp"

namespace accelerate::models::detail {
namespace {

// The formulas go in the order and the precision that transformers has them in: a last bit of a frequency is worth many
// at a late position.

/// The factor at the ends of yarn's ramp, as its source recommends it.
double recommended_scale(double factor, double weight = 1) {
  return factor <= 1 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0;
}

Rotary::Frequencies dynamic(const RotaryOptions& options, const LlamaRopeScaling& scaling, int64_t length,
                            const at::TensorOptions& fp32) {
  const double factor = scaling.factor, n = static_cast<double>(options.dimensions);
  if (length <= options.max_positions) return {rotary_frequencies(options.dimensions, options.base, fp32.device())};
  const auto growth = (at::scalar_tensor(length, fp32.dtype(at::kLong)) * factor / options.max_positions - (factor - 1))
                          .pow(n / (n - 2));
  return {1.0 / at::pow(growth * options.base, at::arange(0, options.dimensions, 2, fp32) / n)};
}

Rotary::Frequencies yarn(const RotaryOptions& options, const LlamaRopeScaling& scaling, const at::TensorOptions& fp32) {
  const auto n = static_cast<double>(options.dimensions),
             original = static_cast<double>(scaling.original_max_position_embeddings);
  // The frequency, as a number from 0 to n / 2, that turns so often within the original context.
  const auto turning = [&](double times) {
    return n * std::log(original / (times * 2 * std::numbers::pi)) / (2 * std::log(options.base));
  };
  double low = turning(scaling.beta_fast), high = turning(scaling.beta_slow);
  if (scaling.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, n - 1);
  if (low == high) high += 0.001;
  const auto waves = at::pow(options.base, at::arange(0, options.dimensions, 2, fp32) / n);
  const auto plain = 1 - ((at::arange(options.dimensions / 2, fp32) - low) / (high - low)).clamp(0, 1);
  const bool weighed = scaling.mscale != 0 && scaling.mscale_all_dim != 0;
  const double recommended = weighed ? recommended_scale(scaling.factor, scaling.mscale) /
                                           recommended_scale(scaling.factor, scaling.mscale_all_dim)
                                     : recommended_scale(scaling.factor);
  return {1.0 / (scaling.factor * waves) * (1 - plain) + 1.0 / waves * plain,
          scaling.attention_factor.value_or(recommended)};
}

Rotary::Frequencies longrope(const RotaryOptions& options, const LlamaRopeScaling& scaling, int64_t length,
                             const at::TensorOptions& fp32) {
  const auto original = scaling.original_max_position_embeddings;
  const auto factors =
      at::tensor(length > original ? scaling.long_factor : scaling.short_factor, at::kFloat).to(fp32.device());
  const double recommended =
      scaling.factor <= 1 ? 1.0 : std::sqrt(1 + std::log(scaling.factor) / std::log(static_cast<double>(original)));
  return {1.0 / (factors * at::pow(options.base, at::arange(0, options.dimensions, 2, fp32) /
                                                     static_cast<double>(options.dimensions))),
          scaling.attention_factor.value_or(recommended)};
}

at::Tensor proportional(const RotaryOptions& options, const LlamaRopeScaling& scaling, const at::TensorOptions& fp32) {
  const auto n = static_cast<double>(options.dimensions);
  const auto turned = static_cast<int64_t>(std::floor(scaling.partial_rotary_factor * n / 2));
  const auto plain = 1.0 / at::pow(options.base, at::arange(0, 2 * turned, 2, fp32) / n);
  return at::cat({plain, at::zeros({options.dimensions / 2 - turned}, fp32)}) / scaling.factor;
}

/// @param length  Of the sequence so far, which only types that follow_length() look at.
Rotary::Frequencies stretched_frequencies(const RotaryOptions& options, const LlamaRopeScaling& scaling, int64_t length,
                                          const at::Device& device) {
  const auto fp32 = at::TensorOptions().dtype(at::kFloat).device(device);
  if (scaling.type == "dynamic") return dynamic(options, scaling, length, fp32);
  if (scaling.type == "yarn") return yarn(options, scaling, fp32);
  if (scaling.type == "longrope") return longrope(options, scaling, length, fp32);
  if (scaling.type == "proportional") return {proportional(options, scaling, fp32)};
  const auto plain = rotary_frequencies(options.dimensions, options.base, device);
  if (scaling.type == "default") return {plain};
  const auto slow = plain / scaling.factor;
  if (scaling.type == "linear") return {slow};
  // Periods within the original context.
  const auto waves = static_cast<double>(scaling.original_max_position_embeddings) * plain / (2 * std::numbers::pi);
  const auto share =
      ((waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1);
  return {(1 - share) * slow + share * plain};
}

}  // namespace

Rotary::Rotary(const at::Tensor& positions, const Frequencies& frequencies, at::ScalarType dtype, Pairs pairs)
    : pairs_(pairs) {
  const auto angles = (positions.to(at::kFloat).unsqueeze(-1) * frequencies.radians).unsqueeze(1);
  const auto scaled = [&](const at::Tensor& x) {
    return (frequencies.scale == 1 ? x : x * frequencies.scale).to(dtype);
  };
  const auto cos = scaled(angles.cos()), sin = scaled(angles.sin());
  if (pairs == Pairs::halves) {
    cos_ = at::cat({cos, cos}, -1);
    sin_ = at::cat({-sin, sin}, -1);
  } else {
    cos_ = at::stack({cos, cos}, -1).flatten(-2);
    sin_ = at::stack({-sin, sin}, -1).flatten(-2);
  }
}

at::Tensor Rotary::rotate(const at::Tensor& x) const {
  const int64_t n = cos_.size(-1);
  if (n < x.size(-1)) return at::cat({rotate(x.narrow(-1, 0, n)), x.narrow(-1, n, x.size(-1) - n)}, -1);
  at::Tensor partners;
  if (pairs_ == Pairs::halves) {
    partners = at::cat({x.narrow(-1, n / 2, n / 2), x.narrow(-1, 0, n / 2)}, -1);
  } else {
    const auto pairs = x.unflatten(-1, {-1, 2});
    partners = at::stack({pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
  }
  return at::addcmul(x * cos_, partners, sin_);
}

std::optional<Rotary::Row> Rotary::row() const {
  const int64_t turned = cos_.size(-1);
  const auto fits = [&](const at::Tensor& x) {
    return x.is_cpu() && x.scalar_type() == at::kFloat && x.is_contiguous() && x.numel() == turned;
  };
  if (pairs_ != Pairs::halves || turned % 2 != 0 || !fits(cos_) || !fits(sin_)) return std::nullopt;
  return Row{cos_.const_data_ptr<float>(), sin_.const_data_ptr<float>(), turned};
}

at::Tensor rotary_frequencies(int64_t n, double base, const at::Device& device) {
  const auto exponents =
      at::arange(0, n, 2, at::TensorOptions().dtype(at::kFloat).device(device)) / static_cast<double>(n);
  return 1.0 / at::pow(base, exponents);
}

Rotary stretched_rotary(const RotaryOptions& options, const LlamaRopeScaling& scaling, const at::Tensor& position_ids,
                        int64_t past, const at::Tensor& hidden) {
  const auto positions = position_ids.defined() ? position_ids : positions_from(past, hidden.size(1), hidden.device());
  int64_t length = past + hidden.size(1);
  // Values cost a wait for the device, and on the meta device there are none.
  if (scaling.follows_length() && position_ids.defined() && !position_ids.is_meta() && position_ids.numel() > 0)
    length = position_ids.max().item<int64_t>() + 1;
  return {positions, stretched_frequencies(options, scaling, length, hidden.device()), hidden.scalar_type()};
}

at::Tensor positions_from(int64_t past, int64_t tokens, const at::Device& device) {
  return at::arange(past, past + tokens, at::TensorOptions().dtype(at::kLong).device(device)).unsqueeze(0);
}

}  // namespace accelerate::models::detail
