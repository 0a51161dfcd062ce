#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "accelerate/codes/codes.hpp"

/// Operations on codes by kernels of our own (kernels.cuh), on NVIDIA's GPUs. A function that has done nothing says so
/// by its result, since there are no kernels for these codes or on this device: then operators do it.
namespace accelerate::codes::cuda {

/// Kernels compute for so many rows of x; with more, decoding and LibTorch's product are faster.
inline constexpr int64_t kMostRows = 8;

/// Rows [first, first + values.size(0)) to `values`: [rows, columns], contiguous, fp32, fp16 or bf16, on the codes'
/// device. @param codes  checked
bool decode_rows(const Codes& codes, int64_t first, const at::Tensor& values);

/// Rows of a table to `values`, [indices, columns]. @param indices  [n], int64 or int32, within the table
bool decode_rows(const Codes& codes, const at::Tensor& indices, const at::Tensor& values);

/// x w^T + bias with decoded weights and fp32 sums, without decoding them to memory. Without autograd.
/// @param x  [.., K], fp32, fp16 or bf16, of at most kMostRows rows, where the codes are. @param w  checked, [N, K]
/// @return  [.., N] of x's dtype; undefined: nothing was done
at::Tensor linear(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias);

}  // namespace accelerate::codes::cuda
