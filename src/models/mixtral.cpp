#include "models/mixtral.hpp"

#include <torch/torch.h>

#include "models/activations.hpp"

namespace accelerate::models::detail {
namespace {

using torch::Tensor;

class MixtralBlockSparseTop2MLP : public torch::nn::Cloneable<MixtralBlockSparseTop2MLP> {
 public:
  explicit MixtralBlockSparseTop2MLP(const LlamaConfig& config)
      : config_(config), activation_(find_activation(config.hidden_act).value()) {
    reset();
  }

  void reset() override {
    w1_ = register_module("w1",
                          std::make_shared<Dense>(config_.hidden_size, config_.intermediate_size, /*with_bias=*/false));
    w2_ = register_module("w2",
                          std::make_shared<Dense>(config_.intermediate_size, config_.hidden_size, /*with_bias=*/false));
    w3_ = register_module("w3",
                          std::make_shared<Dense>(config_.hidden_size, config_.intermediate_size, /*with_bias=*/false));
  }
  Tensor forward(const Tensor& hidden) {
    return w2_->forward(activation_(w1_->forward(hidden)) * w3_->forward(hidden));
  }

 private:
  LlamaConfig config_;
  Activation activation_;
  std::shared_ptr<Dense> w1_, w2_, w3_;
};

}  // namespace

void MixtralSparseMoeBlock::reset() {
  gate_ = register_module("gate",
                          std::make_shared<Dense>(config_.hidden_size, config_.num_local_experts, /*with_bias=*/false));
  experts_ = register_module("experts", torch::nn::ModuleList());
  for (int64_t i = 0; i < config_.num_local_experts; ++i)
    experts_->push_back(std::make_shared<MixtralBlockSparseTop2MLP>(config_));
}

Tensor MixtralSparseMoeBlock::forward(const Tensor& hidden) {
  const auto tokens = hidden.flatten(0, -2);  // [N, D]
  const auto [top, chosen] = torch::softmax(gate_->forward(tokens), -1, at::kFloat).topk(config_.num_experts_per_tok);
  // [N, E]: how much each expert counts for each token.
  const auto shares = torch::zeros({tokens.size(0), config_.num_local_experts}, top.options())
                          .scatter(1, chosen, top / top.sum(-1, true))
                          .to(hidden.scalar_type());
  auto sum = torch::zeros_like(tokens);
  // Without values nobody is chosen: then each expert gets all tokens, so that all weights take part.
  const auto used = shares.is_meta() ? Tensor() : shares.ne(0).any(0).cpu();
  for (int64_t i = 0; i < config_.num_local_experts; ++i) {
    const auto expert = experts_->ptr<MixtralBlockSparseTop2MLP>(i);
    const auto share = shares.select(1, i).unsqueeze(1);
    if (!used.defined()) {
      sum = sum + expert->forward(tokens) * share;
    } else if (used[i].item<bool>()) {
      const auto rows = share.squeeze(1).nonzero().squeeze(1);
      sum = sum.index_add(0, rows, expert->forward(tokens.index_select(0, rows)) * share.index_select(0, rows));
    }
  }
  return sum.view_as(hidden);
}

}  // namespace accelerate::models::detail
