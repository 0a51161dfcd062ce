#pragma once

#include <cmath>
#include <optional>

#include <ATen/ops/scaled_dot_product_attention.h>

#include "accelerate/models/key_value_cache.hpp"
#include "models/masks.hpp"
#include "models/row_operators.hpp"

namespace accelerate::models::detail {

/// [B, T, H * d] -> [B, H, T, d]
inline at::Tensor split_heads(const at::Tensor& x, int64_t head_size) {
  return x.unflatten(-1, {-1, head_size}).transpose(1, 2);
}

struct AttentionOptions {
  std::optional<double> scale;  ///< Of the scores; 1 / sqrt(d) where it is not given.
  double dropout = 0;
};

/// Attention of T queries over S keys. H is a multiple of G: so many queries' heads share the keys of one.
/// @param query  [B, H, T, d]  @param key  [B, G, S, d]  @param value  as key
/// @return [B, T, H * d]
inline at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const AttentionMask& mask, const AttentionOptions& options = {}) {
  const int64_t heads = query.size(1), groups = key.size(1), tokens = query.size(2);
  if (tokens == 1 && !mask.added.defined() && (!mask.is_causal || key.size(2) == 1) && options.dropout == 0)
    if (at::Tensor attended = attend_with_one_token(
            query, key, value, options.scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3)))));
        attended.defined())
      return attended;
  const auto added = mask.added.defined() ? std::optional(mask.added) : std::nullopt;
  if (tokens == 1 && groups != heads && (!added || added->size(1) == 1)) {
    // All heads of a group see the same keys, so for one token they are as good as tokens: no copies of keys for each
    // head.
    const auto grouped = query.reshape({query.size(0), groups, heads / groups, query.size(3)});
    return at::scaled_dot_product_attention(grouped, key, value, added, options.dropout, /*is_causal=*/false,
                                            options.scale)
        .reshape({query.size(0), 1, -1});
  }
  return at::scaled_dot_product_attention(query, key, value, added, options.dropout, mask.is_causal, options.scale,
                                          /*enable_gqa=*/groups != heads)
      .transpose(1, 2)
      .flatten(2);
}

/// The last `count` tokens of [B, T, D]; all of them for 0.
inline at::Tensor last_tokens(const at::Tensor& hidden, int64_t count) {
  return count > 0 && count < hidden.size(1) ? hidden.narrow(1, hidden.size(1) - count, count) : hidden;
}

/// Tokens that a forward finds in its cache, which may be null.
inline int64_t past_tokens(const KeyValueCache* cache) { return cache ? cache->length() : 0; }

/// A layer's keys and values with those of earlier forwards.
inline std::pair<at::Tensor, at::Tensor> remember(KeyValueCache* cache, int64_t layer, const at::Tensor& key,
                                                  const at::Tensor& value) {
  return cache ? cache->update(layer, key, value) : std::pair(key, value);
}

}  // namespace accelerate::models::detail
