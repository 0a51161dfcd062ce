#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>

#include "accelerate/utils/error.hpp"
#include "accelerator/accelerator_impl.hpp"

namespace accelerate {

/// Where the gradients of some parameters are: those of sharded parameters in their shards, one for all tensors that
/// are no parameter of a prepared model.
struct Accelerator::Gradients {
  std::vector<at::Tensor> whole, sharded;
  std::vector<at::Tensor> counted;  ///< of `sharded`: those that no other rank has too
};

Accelerator::Gradients Accelerator::gradients_of(const std::vector<at::Tensor>& parameters) const {
  Gradients found;
  for (const auto& parameter : parameters) {
    at::Tensor shard;
    bool first = true;
    for (const auto& model : impl_->models)
      if (model->fsdp && (shard = model->fsdp->local_shard(parameter)).defined()) {
        first = model->fsdp->replica() == 0;
        break;
      }
    if (shard.defined()) {
      if (!shard.grad().defined()) continue;
      found.sharded.push_back(shard.grad());
      if (first) found.counted.push_back(shard.grad());
    } else if (parameter.grad().defined()) {
      found.whole.push_back(parameter.grad());
    }
  }
  return found;
}

void Accelerator::unscale_gradients() {
  if (!impl_->scaler) return;
  for (const auto& optimizer : impl_->optimizers) impl_->scaler->unscale_(optimizer.optimizer());
}

namespace {

/// Of all elements together; in fp32 at least. 0 for none. Empty shards have none, also for the infinity norm.
at::Tensor norm_of(const std::vector<at::Tensor>& tensors, double norm_type, const at::Device& device) {
  std::vector<at::Tensor> some;
  for (const auto& tensor : tensors)
    if (tensor.numel() > 0) some.push_back(tensor);
  if (some.empty()) return at::zeros({}, at::TensorOptions().device(device));
  auto norms = at::_foreach_norm(some, norm_type);
  for (auto& norm : norms) norm = norm.to(some.front().device());  // a model may lie on several devices
  return at::linalg_vector_norm(at::stack(norms), norm_type);
}

}  // namespace

at::Tensor Accelerator::clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  if (!(max_norm >= 0))
    throw ConfigError("clip_grad_norm_: max_norm is " + std::to_string(max_norm) + ", expected 0 or more");
  unscale_gradients();
  const auto gradients = gradients_of(parameters);
  const bool shared = impl_->fsdp && use_distributed();
  if (gradients.whole.empty() && gradients.sharded.empty() && !shared) return at::zeros({});
  at::NoGradGuard no_grad;
  const at::Device where = !gradients.whole.empty()     ? gradients.whole.front().device()
                           : !gradients.sharded.empty() ? gradients.sharded.front().device()
                                                        : device();
  // A rank that counts nothing must bring the others' dtype.
  const auto type =
      gradients.sharded.empty() ? at::kFloat : at::promote_types(gradients.sharded.front().scalar_type(), at::kFloat);
  at::Tensor total = norm_of(gradients.counted, norm_type, where).to(type);
  if (shared) {
    // The norm of the whole from the norms of its pieces.
    const bool largest = std::isinf(norm_type);
    const at::Tensor sum = comm::all_reduce((largest ? total : total.pow(norm_type)).view({1}).to(device()),
                                            largest ? Reduction::max : Reduction::sum, 1.0)
                               .squeeze(0)
                               .to(where);
    total = largest ? sum : sum.pow(1.0 / norm_type);
  }
  if (!gradients.whole.empty()) {
    const at::Tensor whole = norm_of(gradients.whole, norm_type, where);
    total = gradients.sharded.empty() && !shared ? whole : at::linalg_vector_norm(at::stack({total, whole}), norm_type);
  }
  // No branch on the value: the host need not wait for the device. 1e-6 as in PyTorch.
  const at::Tensor factor = (max_norm / (total + 1e-6)).clamp_max(1.0);
  if (!gradients.whole.empty()) at::_foreach_mul_(gradients.whole, factor);
  if (!gradients.sharded.empty()) at::_foreach_mul_(gradients.sharded, factor);
  return total;
}

void Accelerator::clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  if (!(clip_value >= 0))
    throw ConfigError("clip_grad_value_: clip_value is " + std::to_string(clip_value) + ", expected 0 or more");
  unscale_gradients();
  at::NoGradGuard no_grad;
  const auto gradients = gradients_of(parameters);
  for (at::Tensor gradient : gradients.whole) gradient.clamp_(-clip_value, clip_value);
  for (at::Tensor gradient : gradients.sharded) gradient.clamp_(-clip_value, clip_value);
}

}  // namespace accelerate
