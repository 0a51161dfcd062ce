#include "model/flops.hpp"

#include <unordered_map>

#include "accelerate/model/submodule.hpp"

namespace accelerate {

FlopsPerToken flops_per_token(const ModelRef& model) {
  // A table of embeddings that is tied to a layer is multiplied with there.
  std::unordered_map<const at::TensorImpl*, bool> multiplied;
  FlopsPerToken flops;
  for (const auto& submodule : model.submodules())
    for (const auto& [name, parameter] : submodule.parameters) {
      const bool table = submodule.class_name.starts_with("Embedding");
      bool& counted = multiplied.try_emplace(parameter.unsafeGetTensorImpl(), false).first->second;
      if (table || counted) continue;
      counted = true;
      const auto numel = static_cast<double>(parameter.numel());
      flops.forward += 2 * numel;
      flops.backward += parameter.requires_grad() ? 4 * numel : 2 * numel;
    }
  return flops;
}

}  // namespace accelerate
