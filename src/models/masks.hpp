#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

/// Which keys a query may see. Shapes: B batch, T tokens with queries, S tokens before them (in a cache).
namespace accelerate::models {

struct AttentionMask {
  at::Tensor added;  ///< To the scores, broadcast to [B, H, T, S + T]: 0 where a key is seen, the lowest number where
                     ///< not. Undefined: nothing to add.
  /// Each token sees itself and those before it; said so, attention is faster than with a tensor.
  bool is_causal = false;
};

/// For decoders: a token sees itself and those before it that are no padding.
/// @param attention_mask  [B, S + T], 0 for padding, of any dtype; may be undefined
/// @param hidden          [B, T, D], for T and the scores' dtype and device
/// @param past            S
/// @param window          How many tokens are seen at most, the token itself included.
AttentionMask causal_mask(const at::Tensor& attention_mask, const at::Tensor& hidden, int64_t past = 0,
                          std::optional<int64_t> window = std::nullopt);

/// A mask that adds `bias` to the scores as well. @param bias  [1, H, T, S + T]
AttentionMask with_bias(const AttentionMask& mask, const at::Tensor& bias);

/// For encoders: all see all that is no padding. Parameters as causal_mask().
AttentionMask padding_mask(const at::Tensor& attention_mask, const at::Tensor& hidden);

}  // namespace accelerate::models
