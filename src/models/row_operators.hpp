#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

/// Operators on one row of fp32 on a CPU, of which decoding consists: there nothing counts but how fast
/// weights come from memory, and how many operators it takes. In all other cases (more rows, gradients, autocast, other
/// types or devices) they are LibTorch's. Those that read weights are operators to LibTorch too, so that weights that
/// live elsewhere are fetched for them.
namespace accelerate::models::detail {

/// x W^T + bias, as at::linear: a loop over the weight in the order of memory. MKL's takes about 1.6 times as long on
/// AMD's processors.
/// @param x  [..., inputs]  @param weight  [outputs, inputs]  @param bias  [outputs] or undefined
at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension, as at::rms_norm, which is six operators.
/// @param weight  [size of the last dimension]
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// Attention of one token over all keys, as at::scaled_dot_product_attention without a mask; undefined where that
/// should be called instead.
/// @param query  [B, H, 1, d]  @param key  [B, G, S, d], H a multiple of G  @param value  as key
/// @return [B, 1, H * d]
at::Tensor attend_with_one_token(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double scale);

}  // namespace accelerate::models::detail
