#include "residency/put_away.hpp"

#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>

namespace accelerate::residency {

void PutAway::put(const at::Tensor& tensor, bool pin_memory, bool non_blocking) {
  if (!tensor.defined() || tensor.is_cpu() || tensor.is_meta()) return;
  const at::NoGradGuard no_grad;
  at::Tensor host =
      at::empty_strided(tensor.sizes(), tensor.strides(),
                        at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU).pinned_memory(pin_memory));
  host.copy_(tensor.detach(), non_blocking);
  away_.emplace_back(tensor, tensor.device());
  tensor.set_data(host);
}

void PutAway::bring_back(bool non_blocking) {
  const at::NoGradGuard no_grad;
  for (const auto& [tensor, device] : away_) tensor.set_data(tensor.detach().to(device, non_blocking));
  away_.clear();
}

}  // namespace accelerate::residency
