#pragma once

#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

namespace accelerate::models {

/// The arguments of a language model's forward, to be checked. S tokens are in a cache.
struct TokenInputs {
  std::string model;                 ///< for messages, e.g. "LlamaModel"
  const at::Tensor& input_ids;       ///< [B, T] int64 or int32
  const at::Tensor& attention_mask;  ///< [B, S + T] or undefined
  const at::Tensor& position_ids;    ///< [B, T], [1, T] or undefined
  int64_t past = 0;                  ///< S
  std::optional<int64_t> positions;  ///< that the model has
};

/// @throws ShapeError naming the first tensor of another shape.
void check_inputs(const TokenInputs& inputs);

}  // namespace accelerate::models
