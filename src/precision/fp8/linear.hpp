#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "precision/fp8/core.hpp"

namespace accelerate::fp8 {

/// How an open scope, or the recomputation of what ran in one, treats products.
struct ProductPass {
  std::shared_ptr<Core> core;
  at::Tensor scales;     ///< of delayed scaling, as the scope found them
  bool records = false;  ///< amax: in training
  bool replays = false;  ///< what ran before; nothing is recorded or kept then
  std::optional<bool> is_first_microbatch;
};

/// y = x w^T + bias [..., outputs] from codes, with gradients. Call it as an operator of one's own (OwnOperators), with
/// w's bytes present.
/// @param x     [..., inputs] with at least one row, in the dtype that y gets
/// @param w     [outputs, inputs]: the weight or a view of it
/// @param bias  [outputs], or undefined
at::Tensor linear(const ProductPass& pass, const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                  const FoundWeight& found);

}  // namespace accelerate::fp8
