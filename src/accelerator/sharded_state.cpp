#include <c10/core/GradMode.h>

#include <set>

#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/error.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "accelerator/state_files.hpp"
#include "checkpoint/weight_files.hpp"

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
                    [&](const parallel::FullyShardedDataParallel::Whole& tensor) {
                      whole[tensor.parameter.unsafeGetTensorImpl()] =
                          tensor.value.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
                    },
                    /*everywhere=*/false);
  std::map<std::string, at::Tensor> state;
  if (!is_main_process()) return state;
  for (const auto& [name, tensor] : model.state()) {
    const auto found = whole.find(tensor.unsafeGetTensorImpl());
    state.emplace(name, found != whole.end() ? found->second : tensor.detach());
  }
  return state;
}

void Accelerator::save_model_files(const ModelRef& model, const std::filesystem::path& folder,
                                   const std::string& max_shard_size, bool safe_serialization) const {
  const int64_t bytes = checkpointing::parse_size(max_shard_size);
  const auto fsdp = fsdp_of(model);
  if (!fsdp) {
    if (is_main_process() || (project_configuration().save_on_each_node && is_local_main_process()))
      checkpointing::save_model(model, folder, bytes, safe_serialization);
    return;
  }
  // Every tensor once, under its first name, in the order of the module's state.
  std::map<std::string, at::Tensor> tensors;
  std::vector<checkpointing::WeightSize> weights;
  std::set<const at::TensorImpl*> seen;
  for (const auto& [name, tensor] : model.state()) {
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    const at::Tensor shard = fsdp->local_shard(tensor);
    tensors.emplace(name, tensor);
    weights.push_back({name, tensor.numel() * static_cast<int64_t>((shard.defined() ? shard : tensor).element_size())});
  }
  // All ranks gather file by file; rank 0 holds one file's tensors.
  const auto files = checkpointing::split_weights(weights, bytes);
  size_t gathered = 0;
  const auto gather_next = [&] {
    std::map<const at::TensorImpl*, std::string> wanted;
    std::map<std::string, at::Tensor> whole;
    for (const auto& name : files[gathered++]) {
      const auto& tensor = tensors.at(name);
      if (fsdp->local_shard(tensor).defined()) wanted.emplace(tensor.unsafeGetTensorImpl(), name);
      else whole.emplace(name, tensor.detach());
    }
    fsdp->gather_each(
        [&](const at::Tensor& parameter, const at::Tensor& shard) {
          return wanted.contains(parameter.unsafeGetTensorImpl()) ? shard.detach() : at::Tensor();
        },
        [&](const parallel::FullyShardedDataParallel::Whole& tensor) {
          if (tensor.value.defined())
            whole.emplace(wanted.at(tensor.parameter.unsafeGetTensorImpl()),
                          tensor.value.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
        },
        /*everywhere=*/false);
    return whole;
  };
  together([&] {
    std::exception_ptr failure;
    try {
      if (is_main_process())
        checkpointing::write_weight_files(folder, weights, bytes, safe_serialization,
                                          [&](const std::filesystem::path& file, const std::vector<std::string>&) {
                                            const auto part = gather_next();
                                            if (safe_serialization) save_safetensors(file, part, {{"format", "pt"}});
                                            else checkpointing::save_object(checkpointing::to_dict(part), file);
                                          });
    } catch (const CommError&) {
      throw;
    } catch (...) {
      failure = std::current_exception();
    }
    while (gathered < files.size()) gather_next();  // also after an error, so that all ranks come out in step
    if (failure) std::rethrow_exception(failure);
  });
}

}  // namespace accelerate
