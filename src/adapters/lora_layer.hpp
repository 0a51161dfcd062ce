#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>

#include "residency/chain.hpp"

namespace accelerate {
class ModelRef;
}

namespace accelerate::detail {

/// One adapted weight. The lora_A module owns it.
struct LoraLayer {
  std::string path;     ///< of the module
  std::string in_file;  ///< what PEFT calls it
  std::weak_ptr<torch::nn::Module> module;
  at::Tensor weight;        ///< the module's, with its identity
  at::Tensor a, b;          ///< the parameters of the children
  bool transposed = false;  ///< the weight is [inputs, outputs]
  double scaling = 0, dropout = 0;
  bool enabled = true, merged = false;
  std::optional<residency::ProcessHandler> watched;

  LoraLayer() = default;
  LoraLayer(const LoraLayer&) = delete;
  LoraLayer& operator=(const LoraLayer&) = delete;
  ~LoraLayer();

  /// B A * scaling, in the weight's orientation.
  at::Tensor difference() const;
};

/// From now on operators on the weight come by the chain of handlers, where the adapter's part is added to what they
/// compute; again: also those on the storage that it has by now.
void watch(LoraLayer& layer);
/// All layers of the process.
void watch_all_again();
/// Whether some module of the model belongs to an adapter.
bool has_adapter(const ModelRef& model);
void stop_watching(LoraLayer& layer);

}  // namespace accelerate::detail
