#include "accelerate/models/gpt2.hpp"

#include <cmath>
#include <sstream>

#include <torch/torch.h>

#include "accelerate/error.hpp"
#include "models/activations.hpp"
#include "models/gpt2_config.hpp"
#include "models/layers.hpp"
#include "models/masks.hpp"

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

torch::nn::LayerNorm make_layer_norm(const GPT2Config& config) { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.n_embd}).eps(config.layer_norm_epsilon)); }

class GPT2Attention : public torch::nn::Cloneable<GPT2Attention> {
 public:
  GPT2Attention(const GPT2Config& config, int64_t layer) : config_(config), layer_(layer) { reset(); }

  void reset() override {
    c_attn_ = register_module("c_attn", std::make_shared<Conv1D>(config_.n_embd, 3 * config_.n_embd));
    c_proj_ = register_module("c_proj", std::make_shared<Conv1D>(config_.n_embd, config_.n_embd));
  }

  /// @param mask  Added to the scores, [B, 1, T, T]; undefined: each token sees itself and those before it.
  Tensor forward(const Tensor& hidden, const Tensor& mask) {
    const auto parts = c_attn_->forward(hidden).chunk(3, -1);
    const auto heads = [&](const Tensor& x) { return x.unflatten(-1, {config_.n_head, -1}).transpose(1, 2); };  // [B, H, T, D/H]
    double scale = config_.scale_attn_weights ? 1 / std::sqrt(static_cast<double>(config_.n_embd / config_.n_head)) : 1.0;
    if (config_.scale_attn_by_inverse_layer_idx) scale /= static_cast<double>(layer_ + 1);
    const auto attended = at::scaled_dot_product_attention(heads(parts[0]), heads(parts[1]), heads(parts[2]), mask.defined() ? std::optional(mask) : std::nullopt,
                                                           is_training() ? config_.attn_pdrop : 0.0, /*is_causal=*/!mask.defined(), scale);
    return torch::dropout(c_proj_->forward(attended.transpose(1, 2).flatten(2)), config_.resid_pdrop, is_training());
  }

 private:
  GPT2Config config_;
  int64_t layer_;
  std::shared_ptr<Conv1D> c_attn_, c_proj_;
};

class GPT2MLP : public torch::nn::Cloneable<GPT2MLP> {
 public:
  explicit GPT2MLP(const GPT2Config& config) : config_(config), activation_(find_activation(config.activation_function).value()) { reset(); }

  void reset() override {
    c_fc_ = register_module("c_fc", std::make_shared<Conv1D>(config_.n_embd, config_.inner_size()));
    c_proj_ = register_module("c_proj", std::make_shared<Conv1D>(config_.inner_size(), config_.n_embd));
  }
  Tensor forward(const Tensor& hidden) { return torch::dropout(c_proj_->forward(activation_(c_fc_->forward(hidden))), config_.resid_pdrop, is_training()); }

 private:
  GPT2Config config_;
  Activation activation_;
  std::shared_ptr<Conv1D> c_fc_, c_proj_;
};

class GPT2Block : public torch::nn::Cloneable<GPT2Block> {
 public:
  GPT2Block(const GPT2Config& config, int64_t layer) : config_(config), layer_(layer) { reset(); }

  void reset() override {
    ln_1_ = register_module("ln_1", make_layer_norm(config_));
    attn_ = register_module("attn", std::make_shared<GPT2Attention>(config_, layer_));
    ln_2_ = register_module("ln_2", make_layer_norm(config_));
    mlp_ = register_module("mlp", std::make_shared<GPT2MLP>(config_));
  }

  Tensor forward(const Tensor& hidden, const Tensor& mask) {
    const auto attended = hidden + attn_->forward(ln_1_(hidden), mask);
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

void check_inputs(const GPT2Config& config, const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids) {
  std::ostringstream text;
  if (input_ids.dim() != 2 || (input_ids.scalar_type() != at::kLong && input_ids.scalar_type() != at::kInt)) {
    text << "GPT2Model::forward: input_ids has shape " << input_ids.sizes() << " and dtype " << input_ids.scalar_type() << ", expected [B, T] of int64.";
  } else if (input_ids.size(1) > config.n_positions) {
    text << "GPT2Model::forward: input_ids has " << input_ids.size(1) << " tokens a row, but the model has positions for " << config.n_positions << ". Truncate when tokenizing.";
  } else if (attention_mask.defined() && attention_mask.sizes() != input_ids.sizes()) {
    text << "GPT2Model::forward: attention_mask has shape " << attention_mask.sizes() << ", but input_ids " << input_ids.sizes() << ". Both are [B, T].";
  } else if (position_ids.defined() && (position_ids.dim() != 2 || position_ids.size(1) != input_ids.size(1) || (position_ids.size(0) != 1 && position_ids.size(0) != input_ids.size(0)))) {
    text << "GPT2Model::forward: position_ids has shape " << position_ids.sizes() << ", but input_ids " << input_ids.sizes() << ", expected [B, T] or [1, T].";
  } else {
    return;
  }
  throw ShapeError(text.str());
}

}  // namespace

void initialize(const std::string& name, Tensor parameter, const GPT2Config& config) {
  const torch::NoGradGuard no_grad;
  if (name.ends_with("bias")) {
    parameter.zero_();
  } else if (name.find("ln_") != std::string::npos) {
    parameter.fill_(1);
  } else {
    parameter.normal_(0, name.ends_with("c_proj.weight") ? config.initializer_range / std::sqrt(2.0 * static_cast<double>(config.n_layer)) : config.initializer_range);
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
  ln_f_ = register_module("ln_f", detail::make_layer_norm(config_));
}

Tensor GPT2ModelImpl::forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids) {
  check_inputs(config_, input_ids, attention_mask, position_ids);
  const auto positions = position_ids.defined() ? position_ids : torch::arange(input_ids.size(1), input_ids.options()).unsqueeze(0);
  Tensor hidden = torch::dropout(wte_(input_ids) + wpe_(positions), config_.embd_pdrop, is_training());
  const auto mask = causal_mask(attention_mask, hidden);
  for (const auto& block : *h_) hidden = block->as<detail::GPT2Block>()->forward(hidden, mask);
  return ln_f_(hidden);
}

GPT2LMHeadModelImpl::GPT2LMHeadModelImpl(const GPT2Config& config, Weights weights) : config_(valid(config)) {
  reset();
  if (weights == Weights::fresh) initialize_all(*this, config_);
}

void GPT2LMHeadModelImpl::reset() {
  transformer_ = register_module("transformer", GPT2Model(config_, Weights::uninitialized));
  if (!config_.tie_word_embeddings) lm_head_ = register_module("lm_head", std::make_shared<detail::Dense>(config_.n_embd, config_.vocab_size, /*with_bias=*/false));
}

Tensor GPT2LMHeadModelImpl::forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids) {
  const auto hidden = transformer_->forward(input_ids, attention_mask, position_ids);
  return lm_head_ ? lm_head_->forward(hidden) : at::linear(hidden, transformer_->wte()->weight);
}

}  // namespace accelerate::models
