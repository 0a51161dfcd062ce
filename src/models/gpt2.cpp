#include "accelerate/models/gpt2.hpp"

#include <cmath>

#include <torch/torch.h>

#include "models/activations.hpp"
#include "models/attention.hpp"
#include "models/gpt2_config.hpp"
#include "models/layers.hpp"
#include "models/rotary.hpp"
#include "models/token_inputs.hpp"

// Registered names are Hugging Face's; they make the parameter names of the files.

namespace accelerate::models {
namespace detail {

using torch::Tensor;

/// A linear layer whose weight is stored as [inputs, outputs].
class Conv1D : public torch::nn::Cloneable<Conv1D> {
 public:
  Conv1D(int64_t inputs, int64_t outputs) : inputs_(inputs), outputs_(outputs) { reset(); }

  void reset() override {
    weight_ = register_parameter("weight", torch::empty({inputs_, outputs_}));
    bias_ = register_parameter("bias", torch::empty({outputs_}));
  }
  Tensor forward(const Tensor& x) { return at::linear(x, weight_.t(), bias_); }

 private:
  int64_t inputs_, outputs_;
  Tensor weight_, bias_;
};

class GPT2Attention : public torch::nn::Cloneable<GPT2Attention> {
 public:
  GPT2Attention(const GPT2Config& config, int64_t layer) : config_(config), layer_(layer) { reset(); }

  void reset() override {
    c_attn_ = register_module("c_attn", std::make_shared<Conv1D>(config_.n_embd, 3 * config_.n_embd));
    c_proj_ = register_module("c_proj", std::make_shared<Conv1D>(config_.n_embd, config_.n_embd));
  }

  Tensor forward(const Tensor& hidden, const AttentionMask& mask, KeyValueCache* cache) {
    const auto parts = c_attn_->forward(hidden).chunk(3, -1);
    const auto heads = [&](const Tensor& x) { return split_heads(x, config_.n_embd / config_.n_head); };
    const int64_t head_dim = config_.n_embd / config_.n_head;
    double scale = config_.scale_attn_weights ? 1 / std::sqrt(static_cast<double>(head_dim)) : 1.0;
    if (config_.scale_attn_by_inverse_layer_idx) scale /= static_cast<double>(layer_ + 1);
    const auto [key, value] = remember(cache, layer_, heads(parts[1]), heads(parts[2]));
    const auto attended = attend(heads(parts[0]), key, value, mask,
                                 {.scale = scale, .dropout = is_training() ? config_.attn_pdrop : 0.0});
    return torch::dropout(c_proj_->forward(attended), config_.resid_pdrop, is_training());
  }

 private:
  GPT2Config config_;
  int64_t layer_;
  std::shared_ptr<Conv1D> c_attn_, c_proj_;
};

class GPT2MLP : public torch::nn::Cloneable<GPT2MLP> {
 public:
  explicit GPT2MLP(const GPT2Config& config)
      : config_(config), activation_(find_activation(config.activation_function).value()) {
    reset();
  }

  void reset() override {
    c_fc_ = register_module("c_fc", std::make_shared<Conv1D>(config_.n_embd, config_.inner_size()));
    c_proj_ = register_module("c_proj", std::make_shared<Conv1D>(config_.inner_size(), config_.n_embd));
  }
  Tensor forward(const Tensor& hidden) {
    return torch::dropout(c_proj_->forward(activation_(c_fc_->forward(hidden))), config_.resid_pdrop, is_training());
  }

 private:
  GPT2Config config_;
  Activation activation_;
  std::shared_ptr<Conv1D> c_fc_, c_proj_;
};

class GPT2Block : public torch::nn::Cloneable<GPT2Block>, public NoSplit {
 public:
  GPT2Block(const GPT2Config& config, int64_t layer) : config_(config), layer_(layer) { reset(); }

  void reset() override {
    ln_1_ = register_module("ln_1", make_layer_norm(config_.n_embd, config_.layer_norm_epsilon));
    attn_ = register_module("attn", std::make_shared<GPT2Attention>(config_, layer_));
    ln_2_ = register_module("ln_2", make_layer_norm(config_.n_embd, config_.layer_norm_epsilon));
    mlp_ = register_module("mlp", std::make_shared<GPT2MLP>(config_));
  }

  Tensor forward(const Tensor& hidden, const AttentionMask& mask, KeyValueCache* cache) {
    const auto attended = hidden + attn_->forward(ln_1_(hidden), mask, cache);
    return attended + mlp_->forward(ln_2_(attended));
  }

 private:
  GPT2Config config_;
  int64_t layer_;
  torch::nn::LayerNorm ln_1_ = nullptr, ln_2_ = nullptr;
  std::shared_ptr<GPT2Attention> attn_;
  std::shared_ptr<GPT2MLP> mlp_;
};

}  // namespace detail

namespace {

using torch::Tensor;

const GPT2Config& valid(const GPT2Config& config) {
  config.validate();
  return config;
}

void initialize_all(torch::nn::Module& module, const GPT2Config& config) {
  for (const auto& item : module.named_parameters()) initialize(item.key(), item.value(), config);
}

}  // namespace

void initialize(const std::string& name, const Tensor& parameter, const GPT2Config& config) {
  const torch::NoGradGuard no_grad;
  if (name.ends_with("bias")) {
    parameter.zero_();
  } else if (name.find("ln_") != std::string::npos) {
    parameter.fill_(1);
  } else {
    parameter.normal_(0, name.ends_with("c_proj.weight")
                             ? config.initializer_range / std::sqrt(2.0 * static_cast<double>(config.n_layer))
                             : config.initializer_range);
  }
}

GPT2ModelImpl::GPT2ModelImpl(const GPT2Config& config, Weights weights) : config_(valid(config)) {
  reset();
  if (weights == Weights::fresh) initialize_all(*this, config_);
}

void GPT2ModelImpl::reset() {
  wte_ = register_module("wte", detail::make_embedding(config_.vocab_size, config_.n_embd));
  wpe_ = register_module("wpe", detail::make_embedding(config_.n_positions, config_.n_embd));
  h_ = register_module("h", torch::nn::ModuleList());
  for (int64_t i = 0; i < config_.n_layer; ++i) h_->push_back(std::make_shared<detail::GPT2Block>(config_, i));
  ln_f_ = register_module("ln_f", detail::make_layer_norm(config_.n_embd, config_.layer_norm_epsilon));
}

Tensor GPT2ModelImpl::forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                              KeyValueCache* cache) {
  const int64_t past = detail::past_tokens(cache);
  check_inputs({"GPT2Model", input_ids, attention_mask, position_ids, past, config_.n_positions});
  const auto positions =
      position_ids.defined() ? position_ids : detail::positions_from(past, input_ids.size(1), input_ids.device());
  Tensor hidden = torch::dropout(wte_(input_ids) + wpe_(positions), config_.embd_pdrop, is_training());
  const auto mask = causal_mask(attention_mask, hidden, past);
  for (const auto& block : *h_) hidden = block->as<detail::GPT2Block>()->forward(hidden, mask, cache);
  return ln_f_(hidden);
}

GPT2LMHeadModelImpl::GPT2LMHeadModelImpl(const GPT2Config& config, Weights weights) : config_(valid(config)) {
  reset();
  if (weights == Weights::fresh) initialize_all(*this, config_);
}

void GPT2LMHeadModelImpl::reset() {
  transformer_ = register_module("transformer", GPT2Model(config_, Weights::uninitialized));
  if (!config_.tie_word_embeddings)
    lm_head_ = register_module(
        "lm_head", std::make_shared<detail::Dense>(config_.n_embd, config_.vocab_size, /*with_bias=*/false));
}

Tensor GPT2LMHeadModelImpl::forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                                    KeyValueCache* cache, int64_t logits_to_keep) {
  const auto hidden =
      detail::last_tokens(transformer_->forward(input_ids, attention_mask, position_ids, cache), logits_to_keep);
  return lm_head_ ? lm_head_->forward(hidden) : detail::project(hidden, transformer_->wte()->weight);
}

}  // namespace accelerate::models
