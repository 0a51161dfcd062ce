#include "parallel/pipeline/sizes_only.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/TensorImpl.h>

namespace accelerate::parallel::pipeline {
namespace {

/// Fused kernels write the result as [B, T, H, D/H] and give a view [B, H, T, D/H] of it; the formula, which the meta
/// device takes, gives a plain tensor. ATen's conditions for the CPU's fused kernel.
std::optional<at::Tensor> attention(c10::ArrayRef<c10::IValue> arguments) {
  const at::Tensor query = arguments[0].toTensor(), key = arguments[1].toTensor(), value = arguments[2].toTensor();
  const bool dropout = arguments[4].toDouble() != 0;
  const bool grouped = arguments.size() > 7 && arguments[7].toBool();
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4 || dropout ||
      (!grouped && (query.size(1) != key.size(1) || key.size(1) != value.size(1))))
    return {};
  if (query.size(3) != key.size(3) || query.size(3) != value.size(3) || query.size(0) != key.size(0) ||
      query.size(0) != value.size(0))
    return {};
  if (query.size(2) == 0 || key.size(2) == 0 || query.stride(3) != 1 || key.stride(3) != 1 || value.stride(3) != 1)
    return {};
  return at::empty({query.size(0), query.size(2), query.size(1), value.size(3)}, query.options()).transpose(1, 2);
}

}  // namespace

at::Tensor sizes_of(const at::Tensor& tensor) {
  at::Tensor meta = at::empty_strided(tensor.sizes(), tensor.strides(),
                                      tensor.options().device(at::kMeta).pinned_memory(std::nullopt));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

std::optional<at::Tensor> sizes_only_result(std::string_view name, c10::ArrayRef<c10::IValue> arguments) {
  if (name == "aten::scaled_dot_product_attention") return attention(arguments);
  if (name == "aten::group_norm") {  // keeps the order of memory on a CPU, and not on the meta device
    const at::Tensor input = arguments[0].toTensor();
    return at::empty_like(input, input.suggest_memory_format());
  }
  return {};
}

}  // namespace accelerate::parallel::pipeline
