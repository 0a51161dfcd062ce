#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include "accelerator/accelerator_impl.hpp"
#include "parallel/gradients.hpp"
#include "utils/raise.hpp"

namespace accelerate {

void Accelerator::unscale_gradients() {
  const auto& run = impl_->run;
  if (sync_gradients())
    for (const auto& engine : run.engines()) engine->settle_gradients();
  if (!run.scaler) return;
  for (const auto& optimizer : run.optimizers) run.scaler->unscale_(optimizer.optimizer());
}

at::Tensor Accelerator::clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  if (!(max_norm >= 0)) raise<ConfigError>("clip_grad_norm_: max_norm is {}, expected 0 or more", max_norm);
  unscale_gradients();
  const auto engines = impl_->run.engines();
  const auto gradients = parallel::gradients_of(engines, parameters);
  at::NoGradGuard no_grad;
  const at::Tensor total = parallel::norm_of(gradients, engines, norm_type, device());
  // No branch on the value: the host need not wait for the device. 1e-6 as in PyTorch.
  gradients.scale((max_norm / (total + 1e-6)).clamp_max(1.0));
  return total;
}

void Accelerator::clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  if (!(clip_value >= 0)) raise<ConfigError>("clip_grad_value_: clip_value is {}, expected 0 or more", clip_value);
  unscale_gradients();
  at::NoGradGuard no_grad;
  const auto gradients = parallel::gradients_of(impl_->run.engines(), parameters);
  for (const at::Tensor& gradient : gradients.whole) gradient.clamp_(-clip_value, clip_value);
  for (const at::Tensor& gradient : gradients.pieces) gradient.clamp_(-clip_value, clip_value);
}

}  // namespace accelerate
