/// Attention as accelerators compute it, by fused kernels: a number for each token and head is kept for backward, and
/// no scores between all tokens, which LibTorch's own way on the meta device (its unfused one) would count.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "residency/meta_kernels/meta_kernels.hpp"

namespace accelerate::meta_memory {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The result of the flash kernels: rows of tokens, with the heads of each side by side.
Tensor result_of(const Tensor& query, const Tensor& value) {
  auto sizes = query.sizes().vec();
  sizes.back() = value.size(-1);
  if (sizes.size() != 4) return at::empty(sizes, query.options());
  return at::empty({sizes[0], sizes[2], sizes[1], sizes[3]}, query.options()).transpose(1, 2);
}

struct FusedAttention : torch::autograd::Function<FusedAttention> {
  static Tensor forward(AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value) {
    const Tensor result = result_of(query, value),
                 sums = at::empty(query.sizes().slice(0, query.dim() - 1), query.options().dtype(at::kFloat));
    context->save_for_backward({query, key, value, result, sums});
    return result;
  }
  static variable_list backward(AutogradContext* context, const variable_list&) {
    const auto saved = context->get_saved_variables();
    return {at::empty_like(saved[0]), at::empty_like(saved[1]), at::empty_like(saved[2])};
  }
};

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                 double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  // The fused kernels give no gradient of a mask.
  if (mask && mask->defined() && mask->requires_grad())
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, mask, dropout, is_causal, std::nullopt,
                                                              scale, enable_gqa));
  return FusedAttention::apply(query, key, value);
}

}  // namespace

void add_attention(torch::Library& library) { library.impl("scaled_dot_product_attention", attention); }

}  // namespace accelerate::meta_memory
