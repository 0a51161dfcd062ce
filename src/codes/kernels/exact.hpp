#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "accelerate/codes/codes.hpp"

namespace accelerate::codes::kernels {

/// @throws ShapeError unless x is [.., K] and the bias, if there is one, [N]
void check_product(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias);

/// x w^T + bias with the decoded weight, in x's dtype; without autograd. On the CPU a panel of the weight that stays in
/// the cache is decoded and multiplied, then the next, by each thread, or by all together for many rows. There, codes
/// that are kept once are put into their own order first (drop_packed()): such products come one after another, in
/// training, and their gradients.
/// @param x  [.., K], any floating dtype, where the codes are. @param w  [N, K], checked. @param bias  [N] of any
/// floating dtype, or none
/// @return  [.., N]. @throws as check_product()
at::Tensor exact_linear(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias);

/// The same with the weight's transpose, as gradients come back: g w.
/// @param g  [.., N]. @return  [.., K]
at::Tensor exact_linear_back(const at::Tensor& g, const Codes& w);

}  // namespace accelerate::codes::kernels
