#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <tuple>

#include "residency/meta_kernels/meta_kernels.hpp"

namespace accelerate::meta_memory {
namespace {

using at::Tensor;

std::vector<int64_t> reduced(const Tensor& input, at::OptionalIntArrayRef dims, bool keepdim) {
  std::vector<bool> gone(static_cast<size_t>(input.dim()), !dims || dims->empty());
  if (dims)
    for (const int64_t dim : *dims)
      if (input.dim() > 0) gone[static_cast<size_t>(at::maybe_wrap_dim(dim, input.dim()))] = true;
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < gone.size(); ++i)
    if (!gone[i]) sizes.push_back(input.sizes()[i]);
    else if (keepdim) sizes.push_back(1);
  return sizes;
}

at::ScalarType real_type(const Tensor& input) {
  return c10::isComplexType(input.scalar_type()) ? c10::toRealValueType(input.scalar_type()) : input.scalar_type();
}
at::ScalarType sum_type(const Tensor& input) {
  return c10::isIntegralType(input.scalar_type(), /*includeBool=*/true) ? at::kLong : input.scalar_type();
}

Tensor variance(const Tensor& input, at::OptionalIntArrayRef dims, const std::optional<at::Scalar>&, bool keepdim) {
  return at::empty(reduced(input, dims, keepdim), input.options().dtype(real_type(input)));
}
Tensor& variance_out(const Tensor& input, at::OptionalIntArrayRef dims, const std::optional<at::Scalar>&, bool keepdim,
                     Tensor& out) {
  return out.resize_(reduced(input, dims, keepdim)), out;
}
std::tuple<Tensor, Tensor> variance_and_mean(const Tensor& input, at::OptionalIntArrayRef dims,
                                             const std::optional<at::Scalar>& correction, bool keepdim) {
  return {variance(input, dims, correction, keepdim), at::empty(reduced(input, dims, keepdim), input.options())};
}

Tensor count_nonzero(const Tensor& input, at::IntArrayRef dims) {
  return at::empty(reduced(input, dims, false), input.options().dtype(at::kLong));
}
Tensor nansum(const Tensor& input, at::OptionalIntArrayRef dims, bool keepdim, std::optional<at::ScalarType> dtype) {
  return at::empty(reduced(input, dims, keepdim), input.options().dtype(dtype.value_or(sum_type(input))));
}
Tensor trace_of(const Tensor& input) { return at::empty({}, input.options().dtype(sum_type(input))); }
Tensor dot(const Tensor& input, const Tensor&) { return at::empty({}, input.options()); }
Tensor median_of_all(const Tensor& input) { return at::empty({}, input.options()); }
Tensor extreme(const Tensor& input) { return at::empty({}, input.options()); }
Tensor prod(const Tensor& input, std::optional<at::ScalarType> dtype) {
  return at::empty({}, input.options().dtype(dtype.value_or(sum_type(input))));
}
Tensor addbmm(const Tensor& input, const Tensor& a, const Tensor& b, const at::Scalar&, const at::Scalar&) {
  return at::empty({a.size(1), b.size(2)}, input.options());
}

std::tuple<Tensor, Tensor> value_and_index(const Tensor& input, int64_t dim, bool keepdim) {
  const auto sizes = reduced(input, at::IntArrayRef(dim), keepdim);
  return {at::empty(sizes, input.options()), at::empty(sizes, input.options().dtype(at::kLong))};
}
std::tuple<Tensor&, Tensor&> median_out(const Tensor& input, int64_t dim, bool keepdim, Tensor& values,
                                        Tensor& indices) {
  const auto sizes = reduced(input, at::IntArrayRef(dim), keepdim);
  values.resize_(sizes), indices.resize_(sizes);
  return {values, indices};
}
std::tuple<Tensor&, Tensor&> kthvalue_out(const Tensor& input, c10::SymInt, int64_t dim, bool keepdim, Tensor& values,
                                          Tensor& indices) {
  return median_out(input, dim, keepdim, values, indices);
}

Tensor cdist(const Tensor& a, const Tensor& b, double, std::optional<int64_t>) {
  auto sizes = at::infer_size(a.sizes().slice(0, static_cast<size_t>(a.dim() - 2)),
                              b.sizes().slice(0, static_cast<size_t>(b.dim() - 2)));
  sizes.push_back(a.size(-2)), sizes.push_back(b.size(-2));
  return at::empty(sizes, a.options());
}

}  // namespace

void add_reductions(torch::Library& library) {
  library.impl("var.correction", TORCH_FN(variance));
  library.impl("std.correction", TORCH_FN(variance));
  library.impl("var.correction_out", TORCH_FN(variance_out));
  library.impl("std.correction_out", TORCH_FN(variance_out));
  library.impl("var_mean.correction", TORCH_FN(variance_and_mean));
  library.impl("std_mean.correction", TORCH_FN(variance_and_mean));
  library.impl("count_nonzero.dim_IntList", TORCH_FN(count_nonzero));
  library.impl("nansum", TORCH_FN(nansum));
  library.impl("trace", TORCH_FN(trace_of));
  library.impl("dot", TORCH_FN(dot));
  library.impl("vdot", TORCH_FN(dot));
  library.impl("max", TORCH_FN(extreme));
  library.impl("min", TORCH_FN(extreme));
  library.impl("prod", TORCH_FN(prod));
  library.impl("addbmm", TORCH_FN(addbmm));
  library.impl("median", TORCH_FN(median_of_all));
  library.impl("nanmedian", TORCH_FN(median_of_all));
  library.impl("median.dim_values", TORCH_FN(median_out));
  library.impl("nanmedian.dim_values", TORCH_FN(median_out));
  library.impl("kthvalue.values", TORCH_FN(kthvalue_out));
  library.impl("mode", TORCH_FN(value_and_index));
  library.impl("_cdist_forward", TORCH_FN(cdist));
}

}  // namespace accelerate::meta_memory
