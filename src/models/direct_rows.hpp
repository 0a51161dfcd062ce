#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "codes/kernels/packed.hpp"

/// One row of fp32 on its way through a layer without LibTorch's operators, which while decoding take as long as the
/// weights take to come from memory. Everything here is for one token of one sequence on the CPU.
namespace accelerate::models::detail {

/// Whether rows may go so: nobody asks for gradients, autocast, a profile or a word about operators.
bool rows_go_directly();

/// A weight [n, k] that can be read as it lies: numbers, or codes in the order of products. With its bias.
struct DirectWeight {
  const float* numbers = nullptr;
  std::shared_ptr<const codes::kernels::Packed> packed;
  const float* bias = nullptr;
  int64_t n = 0, k = 0;
};

/// None where the weight, or its bias, is of another kind, or elsewhere.
std::optional<DirectWeight> direct_weight(const at::Tensor& weight, const at::Tensor& bias);
/// Null as above.
const float* direct_numbers(const at::Tensor& vector);

struct DirectProduct {
  const DirectWeight& weight;
  float* y;  ///< [n]
  bool adds = false;
};

/// y = x w^T + bias for each, or y += …
void multiply_row(const float* x, std::initializer_list<DirectProduct> products);

/// y = x / sqrt(mean(x^2) + eps) * weight
void norm_row(const float* x, const float* weight, double eps, int64_t count, float* y);

/// gate = silu(gate) * factor
void gate_row(float* gate, const float* factor, int64_t count);

/// Turns heads of `size` numbers by the angles of one position (Rotary::Row), in place.
void turn_row(float* heads, int64_t count, int64_t size, const float* cosines, const float* sines, int64_t turned);

/// Keys or values of all tokens: [G][capacity][d], of which the first `tokens` are there.
struct DirectAttention {
  const float *keys, *values;
  int64_t capacity, tokens, heads, groups, size;
  float scale;
};
/// @param query  [H][d] @param y  as query
void attend_row(const float* query, const DirectAttention& attention, float* y);

}  // namespace accelerate::models::detail
