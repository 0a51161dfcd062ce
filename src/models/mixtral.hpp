#pragma once

#include <memory>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>

#include "accelerate/models/llama.hpp"
#include "models/layers.hpp"

namespace accelerate::models::detail {

/// MLPs of which a router chooses a few for each token. Source: arXiv:2401.04088. Names are those of the Hub's files,
/// where each expert has weights of its own: so an offloaded model brings only the chosen ones.
class MixtralSparseMoeBlock : public torch::nn::Cloneable<MixtralSparseMoeBlock> {
 public:
  explicit MixtralSparseMoeBlock(const LlamaConfig& config) : config_(config) { reset(); }
  void reset() override;
  torch::Tensor forward(const torch::Tensor& hidden);

 private:
  LlamaConfig config_;
  std::shared_ptr<Dense> gate_;
  torch::nn::ModuleList experts_ = nullptr;
};

}  // namespace accelerate::models::detail
