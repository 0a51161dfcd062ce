#include <c10/core/GradMode.h>

#include "accelerator/accelerator_impl.hpp"

namespace accelerate {

std::shared_ptr<parallel::FullyShardedDataParallel> Accelerator::fsdp_of(const ModelRef& model) const {
  for (const auto& known : impl_->models)
    if (known->fsdp && known->model.identity() == model.identity()) return known->fsdp;
  return nullptr;
}

std::map<std::string, at::Tensor> Accelerator::state_dict_of(const ModelRef& model) const {
  const auto fsdp = fsdp_of(model);
  if (!fsdp) return checkpointing::state_dict(model);
  // Names as the module's own, tied weights under each of theirs.
  std::map<const at::TensorImpl*, at::Tensor> whole;
  fsdp->gather_each([](const at::Tensor&, const at::Tensor& shard) { return shard.detach(); },
                    [&](const parallel::FullyShardedDataParallel::Whole& tensor) { whole[tensor.parameter.unsafeGetTensorImpl()] = tensor.value.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true); }, /*everywhere=*/false);
  std::map<std::string, at::Tensor> state;
  if (!is_main_process()) return state;
  for (const auto& [name, tensor] : model.state()) {
    const auto found = whole.find(tensor.unsafeGetTensorImpl());
    state.emplace(name, found != whole.end() ? found->second : tensor.detach());
  }
  return state;
}

}  // namespace accelerate
