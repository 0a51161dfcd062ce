#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <array>
#include <tuple>

#include "residency/meta_kernels/meta_kernels.hpp"

namespace accelerate::meta_memory {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::tuple<Tensor, Tensor, Tensor>;

Tensor like(bool want, const OptionalTensor& tensor) {
  return want && tensor && tensor->defined() ? at::empty_like(*tensor) : Tensor();
}

/// A 16-bit input with 32-bit weights has 32-bit statistics.
at::TensorOptions statistics_of(const Tensor& input, const OptionalTensor& weight) {
  const bool mixed = weight && weight->defined() && weight->scalar_type() != input.scalar_type();
  return input.options().dtype(mixed ? at::toOpMathType(input.scalar_type()) : input.scalar_type());
}

Tensors native_layer_norm(const Tensor& input, c10::SymIntArrayRef shape, const OptionalTensor& weight,
                          const OptionalTensor&, double) {
  auto rows = input.sizes().vec();
  for (size_t i = rows.size() - shape.size(); i < rows.size(); ++i) rows[i] = 1;
  const auto statistics = statistics_of(input, weight);
  return {at::empty_like(input, at::MemoryFormat::Contiguous), at::empty(rows, statistics),
          at::empty(rows, statistics)};
}

Tensors native_layer_norm_backward(const Tensor&, const Tensor& input, c10::SymIntArrayRef, const Tensor&,
                                   const Tensor&, const OptionalTensor& weight, const OptionalTensor& bias,
                                   std::array<bool, 3> wanted) {
  return {wanted[0] ? at::empty_like(input, at::MemoryFormat::Contiguous) : Tensor(), like(wanted[1], weight),
          like(wanted[2], bias)};
}

/// Sizes of what backward needs: a batch's mean and deviation, or nothing.
Tensors batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor&, bool training) {
  const auto statistics = statistics_of(input, weight);
  const int64_t channels = training ? input.size(1) : 0;
  return {at::empty_like(input, input.suggest_memory_format()), at::empty({channels}, statistics),
          at::empty({channels}, statistics)};
}
Tensors native_batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                          const OptionalTensor&, const OptionalTensor&, bool training, double, double) {
  return batch_norm(input, weight, bias, training);
}
Tensors native_batch_norm_legit(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, Tensor&,
                                Tensor&, bool training, double, double) {
  return batch_norm(input, weight, bias, training);
}

Tensors native_batch_norm_backward(const Tensor&, const Tensor& input, const OptionalTensor& weight,
                                   const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                   const OptionalTensor&, bool, double, std::array<bool, 3> wanted) {
  const auto parameter = [&](bool want) {
    return want ? at::empty({input.size(1)}, weight && weight->defined() ? weight->options() : input.options())
                : Tensor();
  };
  return {wanted[0] ? at::empty_like(input, input.suggest_memory_format()) : Tensor(), parameter(wanted[1]),
          parameter(wanted[2])};
}

Tensors native_group_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor&, c10::SymInt samples,
                          c10::SymInt, c10::SymInt, int64_t groups, double) {
  const auto statistics = statistics_of(input, weight);
  return {at::empty_like(input, input.suggest_memory_format()), at::empty({samples.expect_int(), groups}, statistics),
          at::empty({samples.expect_int(), groups}, statistics)};
}

Tensors native_group_norm_backward(const Tensor&, const Tensor& input, const Tensor&, const Tensor&,
                                   const OptionalTensor& weight, c10::SymInt, c10::SymInt, c10::SymInt, int64_t,
                                   std::array<bool, 3> wanted) {
  return {wanted[0] ? at::empty_like(input, input.suggest_memory_format()) : Tensor(), like(wanted[1], weight),
          like(wanted[2], weight)};
}

std::tuple<Tensor, Tensor> weight_norm(const Tensor& v, const Tensor& g, int64_t) {
  return {at::empty_like(v, at::MemoryFormat::Contiguous),
          at::empty_like(g, g.options().dtype(at::toOpMathType(g.scalar_type())), at::MemoryFormat::Contiguous)};
}

}  // namespace

void add_normalisation(torch::Library& library) {
  library.impl("native_layer_norm", TORCH_FN(native_layer_norm));
  library.impl("native_layer_norm_backward", TORCH_FN(native_layer_norm_backward));
  library.impl("native_batch_norm", TORCH_FN(native_batch_norm));
  library.impl("native_batch_norm_backward", TORCH_FN(native_batch_norm_backward));
  library.impl("_native_batch_norm_legit", TORCH_FN(native_batch_norm_legit));
  library.impl("native_group_norm", TORCH_FN(native_group_norm));
  library.impl("native_group_norm_backward", TORCH_FN(native_group_norm_backward));
  library.impl("_weight_norm_interface", TORCH_FN(weight_norm));
}

}  // namespace accelerate::meta_memory
