#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace accelerate::models::detail {

/// x W^T + bias, as at::linear. For one row of fp32 on a CPU, which is what decoding does all the time, nothing counts but how fast the weight comes from memory: there the product is a
/// loop over its rows in the order of memory. MKL's takes about 1.6 times as long on AMD's processors. It is an operator of its own, so that weights that live elsewhere are fetched for it as
/// for any other. With gradients, autocast, other types or devices it is at::linear.
/// @param x  [..., inputs]  @param weight  [outputs, inputs]  @param bias  [outputs] or undefined
at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

}  // namespace accelerate::models::detail
