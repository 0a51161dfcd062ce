#include "models/masks.hpp"

#include <ATen/Dispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace accelerate::models {
namespace {

/// [B, 1, 1, S + T], true for padding; undefined where there is none.
at::Tensor padding(const at::Tensor& attention_mask) {
  if (!attention_mask.defined()) return {};
  const auto padded = attention_mask.eq(0);
  // Worth a look on a CPU, where attention without a mask is faster; on an accelerator it would wait for the device.
  if (padded.is_cpu() && !padded.any().item<bool>()) return {};
  return padded.unsqueeze(1).unsqueeze(1);
}

double lowest(at::ScalarType dtype) {
  double result = 0;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "attention mask",
                                  [&] { result = static_cast<double>(std::numeric_limits<scalar_t>::lowest()); });
  return result;
}

/// The mask that is added to scores. @param unseen  bool
at::Tensor additive(const at::Tensor& unseen, at::ScalarType dtype) {
  return at::zeros(unseen.sizes(), unseen.options().dtype(dtype)).masked_fill_(unseen, lowest(dtype));
}

}  // namespace

AttentionMask causal_mask(const at::Tensor& attention_mask, const at::Tensor& hidden, int64_t past,
                          std::optional<int64_t> window) {
  const int64_t tokens = hidden.size(1), all = past + tokens;
  const auto padded = padding(attention_mask);
  const bool windowed = window && *window < all;
  if (!padded.defined() && !windowed && (past == 0 || tokens == 1)) return {.added = {}, .is_causal = tokens > 1};
  const auto options = hidden.options().dtype(at::kLong);
  const auto keys = at::arange(all, options), queries = at::arange(past, all, options).unsqueeze(1);
  auto unseen = keys > queries;  // [T, S + T]
  if (windowed) unseen = unseen.bitwise_or(keys <= queries - *window);
  if (padded.defined()) unseen = padded.bitwise_or(unseen);
  return {.added = additive(unseen, hidden.scalar_type())};
}

AttentionMask padding_mask(const at::Tensor& attention_mask, const at::Tensor& hidden) {
  const auto padded = padding(attention_mask);
  return {.added = padded.defined() ? additive(padded, hidden.scalar_type()) : at::Tensor()};
}

AttentionMask with_bias(const AttentionMask& mask, const at::Tensor& bias) {
  auto added = bias;
  if (mask.added.defined()) added = added + mask.added;
  if (mask.is_causal)
    added = added.masked_fill(
        at::ones({bias.size(2), bias.size(3)}, bias.options().dtype(at::kBool).requires_grad(false)).triu(1),
        lowest(bias.scalar_type()));
  return {.added = added};
}

}  // namespace accelerate::models
