#pragma once

#include <ATen/core/Tensor.h>

namespace accelerate::models {

/// What decoders add to attention scores, [B, 1, T, T]: 0 for a token itself and those before it that are no padding, the lowest number for the rest. Undefined where
/// nothing is padded: then is_causal says the same faster.
/// @param attention_mask  [B, T], 0 for padding, of any dtype; may be undefined
/// @param like            of the scores' dtype and device
at::Tensor causal_mask(const at::Tensor& attention_mask, const at::Tensor& like);

}  // namespace accelerate::models
