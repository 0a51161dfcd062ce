#include "models/masks.hpp"

#include <ATen/Dispatch.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace accelerate::models {

at::Tensor causal_mask(const at::Tensor& attention_mask, const at::Tensor& like) {
  if (!attention_mask.defined()) return {};
  const auto padded = attention_mask.eq(0);
  // Worth a look on a CPU, where attention without a mask is faster; on an accelerator it would wait for the device.
  if (padded.is_cpu() && !padded.any().item<bool>()) return {};
  const int64_t tokens = padded.size(1);
  const auto later = at::ones({tokens, tokens}, padded.options()).triu(1);
  double lowest = 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, like.scalar_type(), "causal_mask", [&] { lowest = static_cast<double>(std::numeric_limits<scalar_t>::lowest()); });
  return at::zeros({padded.size(0), 1, tokens, tokens}, padded.options().dtype(like.scalar_type())).masked_fill_(later.bitwise_or(padded.unsqueeze(1).unsqueeze(1)), lowest);
}

}  // namespace accelerate::models
