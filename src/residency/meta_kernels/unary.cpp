#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/result_type.h>
#include <c10/core/ScalarType.h>

#include <tuple>

#include "residency/meta_kernels/meta_kernels.hpp"

namespace accelerate::meta_memory {
namespace {

using at::Tensor;

Tensor relu(const Tensor& input) { return at::empty_like(input); }
Tensor hardtanh(const Tensor& input, const at::Scalar&, const at::Scalar&) { return at::empty_like(input); }
Tensor isnan(const Tensor& input) { return at::empty_like(input, input.options().dtype(at::kBool)); }
Tensor prelu(const Tensor& input, const Tensor&) { return at::empty_like(input); }
Tensor angle(const Tensor& input) {
  const auto type = input.scalar_type();
  return at::empty_like(input,
                        input.options().dtype(c10::isComplexType(type)          ? c10::toRealValueType(type)
                                              : c10::isIntegralType(type, true) ? c10::get_default_dtype_as_scalartype()
                                                                                : type));
}
std::tuple<Tensor, Tensor> log_sigmoid_forward(const Tensor& input) {
  return {at::empty_like(input), at::empty_like(input)};
}
Tensor log_sigmoid_backward(const Tensor&, const Tensor& input, const Tensor&) { return at::empty_like(input); }
Tensor backward_of_one(const Tensor& grad, const Tensor&) { return at::empty_like(grad); }
Tensor hardtanh_backward(const Tensor& grad, const Tensor&, const at::Scalar&, const at::Scalar&) {
  return at::empty_like(grad);
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double, std::optional<bool>) {
  return {at::empty_like(input), at::empty_like(input, input.options().dtype(at::kBool))};
}
Tensor native_dropout_backward(const Tensor& grad, const Tensor&, double) { return at::empty_like(grad); }

Tensor floor_divide(const Tensor& self, const Tensor& other) {
  return at::empty(at::infer_size(self.sizes(), other.sizes()), self.options().dtype(at::result_type(self, other)));
}

// The functional forms make the result's dtype and call these.
Tensor& abs_out(const Tensor& input, Tensor& out) { return out.resize_(input.sizes()), out; }
Tensor& logical_not_out(const Tensor& input, Tensor& out) { return out.resize_(input.sizes()), out; }
Tensor& nan_to_num_out(const Tensor& input, std::optional<double>, std::optional<double>, std::optional<double>,
                       Tensor& out) {
  return out.resize_(input.sizes()), out;
}
Tensor& binary_out(const Tensor& self, const Tensor& other, Tensor& out) {
  return out.resize_(at::infer_size(self.sizes(), other.sizes())), out;
}

}  // namespace

void add_unary(torch::Library& library) {
  library.impl("relu", TORCH_FN(relu));
  library.impl("hardswish", TORCH_FN(relu));
  library.impl("hardtanh", TORCH_FN(hardtanh));
  library.impl("isnan", TORCH_FN(isnan));
  library.impl("angle", TORCH_FN(angle));
  library.impl("_prelu_kernel", TORCH_FN(prelu));
  library.impl("log_sigmoid_forward", TORCH_FN(log_sigmoid_forward));
  library.impl("log_sigmoid_backward", TORCH_FN(log_sigmoid_backward));
  library.impl("hardswish_backward", TORCH_FN(backward_of_one));
  library.impl("mish_backward", TORCH_FN(backward_of_one));
  library.impl("hardtanh_backward", TORCH_FN(hardtanh_backward));
  library.impl("native_dropout", TORCH_FN(native_dropout));
  library.impl("native_dropout_backward", TORCH_FN(native_dropout_backward));
  library.impl("floor_divide", TORCH_FN(floor_divide));
  library.impl("abs.out", TORCH_FN(abs_out));
  library.impl("logical_not.out", TORCH_FN(logical_not_out));
  library.impl("nan_to_num.out", TORCH_FN(nan_to_num_out));
  for (const char* name : {"logical_and.out", "logical_or.out", "logical_xor.out", "polar.out", "complex.out"})
    library.impl(name, TORCH_FN(binary_out));
}

}  // namespace accelerate::meta_memory
