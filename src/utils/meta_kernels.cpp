#include "utils/meta_kernels.hpp"

#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>
#include <torch/library.h>

#include <array>
#include <tuple>

namespace accelerate::meta_memory {
namespace {

using at::Tensor;
using Tensors = std::tuple<Tensor, Tensor, Tensor>;

Tensor index_select(const Tensor& input, int64_t dim, const Tensor& index) {
  auto sizes = input.sizes().vec();
  if (!sizes.empty()) sizes[static_cast<size_t>(dim < 0 ? dim + input.dim() : dim)] = index.numel();
  return at::empty(sizes, input.options());
}

Tensor where(const Tensor& condition, const Tensor& self, const Tensor& other) {
  const auto sizes = at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes()));
  return at::empty(sizes, condition.options().dtype(at::result_type(self, other)));
}

Tensor& where_out(const Tensor& condition, const Tensor& self, const Tensor& other, Tensor& out) {
  out.resize_(at::infer_size(condition.sizes(), at::infer_size(self.sizes(), other.sizes())));
  return out;
}

Tensor relu(const Tensor& input) { return at::empty_like(input); }

Tensor embedding_dense_backward(const Tensor& grad, const Tensor&, c10::SymInt count, c10::SymInt, bool) {
  return at::empty({count.expect_int(), grad.size(-1)}, grad.options());
}

Tensors native_layer_norm(const Tensor& input, c10::SymIntArrayRef shape, const std::optional<Tensor>&, const std::optional<Tensor>&, double) {
  auto rows = input.sizes().vec();
  for (size_t i = rows.size() - shape.size(); i < rows.size(); ++i) rows[i] = 1;
  const auto statistics = input.options().dtype(at::toOpMathType(input.scalar_type()));
  return {at::empty_like(input, at::MemoryFormat::Contiguous), at::empty(rows, statistics), at::empty(rows, statistics)};
}

Tensors native_layer_norm_backward(const Tensor&, const Tensor& input, c10::SymIntArrayRef, const Tensor&, const Tensor&, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                                   std::array<bool, 3> wanted) {
  const auto like = [](bool want, const std::optional<Tensor>& tensor) { return want && tensor && tensor->defined() ? at::empty_like(*tensor) : Tensor(); };
  return {wanted[0] ? at::empty_like(input, at::MemoryFormat::Contiguous) : Tensor(), like(wanted[1], weight), like(wanted[2], bias)};
}

}  // namespace

void install_kernels() {
  // Not by TORCH_LIBRARY_IMPL: a static library's object file that nobody calls is not linked.
  static const torch::Library library = [] {
    torch::Library registration(torch::Library::IMPL, "aten", c10::DispatchKey::Meta, __FILE__, __LINE__);
    registration.impl("index_select", TORCH_FN(index_select));
    registration.impl("where.self", TORCH_FN(where));
    registration.impl("where.self_out", TORCH_FN(where_out));
    registration.impl("relu", TORCH_FN(relu));
    registration.impl("embedding_dense_backward", TORCH_FN(embedding_dense_backward));
    registration.impl("native_layer_norm", TORCH_FN(native_layer_norm));
    registration.impl("native_layer_norm_backward", TORCH_FN(native_layer_norm_backward));
    return registration;
  }();
}

}  // namespace accelerate::meta_memory
