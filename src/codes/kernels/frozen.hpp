#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <torch/custom_class.h>

#include <optional>

#include "accelerate/codes/codes.hpp"

namespace accelerate::codes::kernels {

/// A weight in few bits that autograd remembers until backward: whoever has its codes then gives them.
struct FrozenWeight : torch::CustomClassHolder {
  /// The result of `use` on the codes, which are there and on `device` meanwhile. Throws when they have gone.
  virtual at::Tensor with_codes(const at::Device& device,
                                c10::function_ref<at::Tensor(const Codes& codes)> use) const = 0;
};

/// Whether somebody wants a gradient of a product of these.
bool wants_gradient(const at::Tensor& x, const std::optional<at::Tensor>& bias);

/// x w^T + bias for autograd. Gradients are those of the decoded weight, which has none itself: nothing but its codes
/// is kept, and they are decoded once more. Gradients have gradients, as often as one likes.
/// @param product  computes it, without autograd
at::Tensor frozen_linear(const at::Tensor& x, const std::optional<at::Tensor>& bias,
                         const c10::intrusive_ptr<FrozenWeight>& weight, c10::function_ref<at::Tensor()> product);

}  // namespace accelerate::codes::kernels
