#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "accelerate/error.hpp"
#include "accelerator/accelerator_impl.hpp"

namespace accelerate {
namespace {

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters)
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  return gradients;
}

}  // namespace

void Accelerator::unscale_gradients() {
  if (!impl_->scaler) return;
  for (const auto& optimizer : impl_->optimizers) impl_->scaler->unscale_(optimizer.optimizer());
}

at::Tensor Accelerator::clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  if (!(max_norm >= 0)) throw ConfigError("clip_grad_norm_: max_norm is " + std::to_string(max_norm) + ", expected 0 or more");
  unscale_gradients();
  const auto gradients = gradients_of(parameters);
  if (gradients.empty()) return at::zeros({});
  at::NoGradGuard no_grad;
  auto norms = at::_foreach_norm(gradients, norm_type);
  for (auto& norm : norms) norm = norm.to(gradients.front().device());  // a model may lie on several devices
  const at::Tensor total = at::linalg_vector_norm(at::stack(norms), norm_type);
  // No branch on the value: the host need not wait for the device. 1e-6 as in PyTorch.
  at::_foreach_mul_(gradients, (max_norm / (total + 1e-6)).clamp_max(1.0));
  return total;
}

void Accelerator::clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  if (!(clip_value >= 0)) throw ConfigError("clip_grad_value_: clip_value is " + std::to_string(clip_value) + ", expected 0 or more");
  unscale_gradients();
  at::NoGradGuard no_grad;
  for (at::Tensor gradient : gradients_of(parameters)) gradient.clamp_(-clip_value, clip_value);
}

}  // namespace accelerate
