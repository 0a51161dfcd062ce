#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>

#include <tuple>

#include "residency/meta_kernels/meta_kernels.hpp"

namespace accelerate::meta_memory {
namespace {

using at::Tensor;

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

Tensor embedding_dense_backward(const Tensor& grad, const Tensor&, c10::SymInt count, c10::SymInt, bool) {
  return at::empty({count.expect_int(), grad.size(-1)}, grad.options());
}

Tensor take(const Tensor& input, const Tensor& index) { return at::empty(index.sizes(), input.options()); }

Tensor flip(const Tensor& input, at::IntArrayRef) { return at::empty_like(input); }
Tensor roll(const Tensor& input, c10::SymIntArrayRef, at::IntArrayRef) {
  return at::empty_like(input, at::MemoryFormat::Contiguous);
}

Tensor unfold_backward(const Tensor& grad, c10::SymIntArrayRef sizes, int64_t, int64_t, int64_t) {
  return at::empty(C10_AS_INTARRAYREF_SLOW(sizes), grad.options());
}

Tensor positions(const Tensor& of, bool out_int32) {
  return at::empty(of.sizes(), of.options().dtype(out_int32 ? at::kInt : at::kLong));
}
Tensor bucketize(const Tensor& input, const Tensor&, bool out_int32, bool) { return positions(input, out_int32); }
Tensor searchsorted(const Tensor&, const Tensor& input, bool out_int32, bool, std::optional<c10::string_view>,
                    const std::optional<Tensor>&) {
  return positions(input, out_int32);
}

Tensor multinomial(const Tensor& input, c10::SymInt samples, bool, std::optional<at::Generator>) {
  auto sizes = input.sizes().vec();
  sizes.back() = samples.expect_int();
  return at::empty(sizes, input.options().dtype(at::kLong));
}

/// Bags and their sum; what only backward needs besides has the sizes that it has on a CPU for sums.
std::tuple<Tensor, Tensor, Tensor, Tensor> embedding_bag(const Tensor& weight, const Tensor& indices,
                                                         const Tensor& offsets, bool, int64_t mode, bool,
                                                         const std::optional<Tensor>&, bool include_last_offset,
                                                         int64_t) {
  constexpr int64_t kMax = 2;
  const int64_t bags = offsets.size(0) - (include_last_offset ? 1 : 0);
  const Tensor output = at::empty({bags, weight.size(1)}, weight.options());
  const Tensor sizes = at::empty({bags}, offsets.options());
  return {output, at::empty({mode == kMax ? indices.size(0) : 0}, indices.options()), sizes,
          mode == kMax ? at::empty({bags, weight.size(1)}, indices.options()) : at::empty({bags}, offsets.options())};
}

}  // namespace

void add_indexing(torch::Library& library) {
  library.impl("index_select", TORCH_FN(index_select));
  library.impl("where.self", TORCH_FN(where));
  library.impl("where.self_out", TORCH_FN(where_out));
  library.impl("embedding_dense_backward", TORCH_FN(embedding_dense_backward));
  library.impl("take", TORCH_FN(take));
  library.impl("flip", TORCH_FN(flip));
  library.impl("roll", TORCH_FN(roll));
  library.impl("unfold_backward", TORCH_FN(unfold_backward));
  library.impl("bucketize.Tensor", TORCH_FN(bucketize));
  library.impl("searchsorted.Tensor", TORCH_FN(searchsorted));
  library.impl("multinomial", TORCH_FN(multinomial));
  library.impl("_embedding_bag", TORCH_FN(embedding_bag));
  library.impl("_embedding_bag_forward_only", TORCH_FN(embedding_bag));
}

}  // namespace accelerate::meta_memory
