#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "residency/meta_kernels/meta_kernels.hpp"

namespace accelerate::meta_memory {
namespace {

using at::Tensor;

Tensor loss(const Tensor& input, const Tensor& target, int64_t reduction) {
  return reduction == at::Reduction::None ? at::empty(at::infer_size(input.sizes(), target.sizes()), input.options())
                                          : at::empty({}, input.options());
}
Tensor huber_loss(const Tensor& input, const Tensor& target, int64_t reduction, double) {
  return loss(input, target, reduction);
}
Tensor binary_cross_entropy(const Tensor& input, const Tensor& target, const std::optional<Tensor>&,
                            int64_t reduction) {
  return loss(input, target, reduction);
}
Tensor binary_cross_entropy_backward(const Tensor&, const Tensor& input, const Tensor&, const std::optional<Tensor>&,
                                     int64_t) {
  return at::empty_like(input);
}
Tensor mse_loss_backward(const Tensor&, const Tensor& input, const Tensor&, int64_t) {
  return at::empty_like(input, at::MemoryFormat::Contiguous);
}
Tensor& with_parameter_out(const Tensor&, const Tensor& input, const Tensor& target, int64_t, double, Tensor& out) {
  return out.resize_(at::infer_size(input.sizes(), target.sizes())), out;
}

}  // namespace

void add_losses(torch::Library& library) {
  library.impl("huber_loss", TORCH_FN(huber_loss));
  library.impl("huber_loss_backward.out", TORCH_FN(with_parameter_out));
  library.impl("smooth_l1_loss_backward.grad_input", TORCH_FN(with_parameter_out));
  library.impl("binary_cross_entropy", TORCH_FN(binary_cross_entropy));
  library.impl("binary_cross_entropy_backward", TORCH_FN(binary_cross_entropy_backward));
  library.impl("mse_loss_backward", TORCH_FN(mse_loss_backward));
}

}  // namespace accelerate::meta_memory
