#include "accelerate/models/llama.hpp"

#include <numbers>
#include <sstream>

#include <torch/torch.h>

#include "accelerate/error.hpp"
#include "models/activations.hpp"
#include "models/layers.hpp"
#include "models/llama_config.hpp"
#include "models/masks.hpp"

// Registered names are Hugging Face's; they make the parameter names of the files.

namespace accelerate::models {
namespace detail {

using torch::Tensor;

/// What all layers of one forward share.
struct LlamaContext {
  Tensor cos, sin;  ///< [B or 1, 1, T, head_size]
  Tensor mask;      ///< added to the scores, [B, 1, T, T]; undefined: each token sees itself and those before it
};

/// The second half of each head is the imaginary part of the first.
Tensor rotate(const Tensor& x, const LlamaContext& context) {
  const auto halves = x.chunk(2, -1);
  return x * context.cos + torch::cat({-halves[1], halves[0]}, -1) * context.sin;
}

class LlamaAttention : public torch::nn::Cloneable<LlamaAttention> {
 public:
  explicit LlamaAttention(const LlamaConfig& config) : config_(config) { reset(); }

  void reset() override {
    const int64_t size = config_.head_size(), all = config_.num_attention_heads * size, shared = config_.key_value_heads() * size;
    q_proj_ = register_module("q_proj", std::make_shared<Dense>(config_.hidden_size, all, config_.attention_bias));
    k_proj_ = register_module("k_proj", std::make_shared<Dense>(config_.hidden_size, shared, config_.attention_bias));
    v_proj_ = register_module("v_proj", std::make_shared<Dense>(config_.hidden_size, shared, config_.attention_bias));
    o_proj_ = register_module("o_proj", std::make_shared<Dense>(all, config_.hidden_size, config_.attention_bias));
  }

  Tensor forward(const Tensor& hidden, const LlamaContext& context) {
    const auto heads = [&](const Tensor& x) { return x.unflatten(-1, {-1, config_.head_size()}).transpose(1, 2); };  // [B, H, T, head_size]
    const auto query = rotate(heads(q_proj_->forward(hidden)), context), key = rotate(heads(k_proj_->forward(hidden)), context), value = heads(v_proj_->forward(hidden));
    const auto attended = at::scaled_dot_product_attention(query, key, value, context.mask.defined() ? std::optional(context.mask) : std::nullopt,
                                                           is_training() ? config_.attention_dropout : 0.0, /*is_causal=*/!context.mask.defined(), /*scale=*/std::nullopt,
                                                           /*enable_gqa=*/config_.key_value_heads() != config_.num_attention_heads);
    return o_proj_->forward(attended.transpose(1, 2).flatten(2));
  }

 private:
  LlamaConfig config_;
  std::shared_ptr<Dense> q_proj_, k_proj_, v_proj_, o_proj_;
};

/// SwiGLU. Source: arXiv:2002.05202.
class LlamaMLP : public torch::nn::Cloneable<LlamaMLP> {
 public:
  explicit LlamaMLP(const LlamaConfig& config) : config_(config), activation_(find_activation(config.hidden_act).value()) { reset(); }

  void reset() override {
    gate_proj_ = register_module("gate_proj", std::make_shared<Dense>(config_.hidden_size, config_.intermediate_size, config_.mlp_bias));
    up_proj_ = register_module("up_proj", std::make_shared<Dense>(config_.hidden_size, config_.intermediate_size, config_.mlp_bias));
    down_proj_ = register_module("down_proj", std::make_shared<Dense>(config_.intermediate_size, config_.hidden_size, config_.mlp_bias));
  }

  Tensor forward(const Tensor& hidden) { return down_proj_->forward(activation_(gate_proj_->forward(hidden)) * up_proj_->forward(hidden)); }

 private:
  LlamaConfig config_;
  Activation activation_;
  std::shared_ptr<Dense> gate_proj_, up_proj_, down_proj_;
};

class LlamaDecoderLayer : public torch::nn::Cloneable<LlamaDecoderLayer> {
 public:
  explicit LlamaDecoderLayer(const LlamaConfig& config) : config_(config) { reset(); }

  void reset() override {
    self_attn_ = register_module("self_attn", std::make_shared<LlamaAttention>(config_));
    mlp_ = register_module("mlp", std::make_shared<LlamaMLP>(config_));
    input_layernorm_ = register_module("input_layernorm", std::make_shared<RmsNorm>(config_.hidden_size, config_.rms_norm_eps));
    post_attention_layernorm_ = register_module("post_attention_layernorm", std::make_shared<RmsNorm>(config_.hidden_size, config_.rms_norm_eps));
  }

  Tensor forward(const Tensor& hidden, const LlamaContext& context) {
    const auto attended = hidden + self_attn_->forward(input_layernorm_->forward(hidden), context);
    return attended + mlp_->forward(post_attention_layernorm_->forward(attended));
  }

 private:
  LlamaConfig config_;
  std::shared_ptr<LlamaAttention> self_attn_;
  std::shared_ptr<LlamaMLP> mlp_;
  std::shared_ptr<RmsNorm> input_layernorm_, post_attention_layernorm_;
};

}  // namespace detail

namespace {

using detail::LlamaContext;
using torch::Tensor;

/// Angle per position of each pair of a head's dimensions, [head_size / 2] in fp32.
Tensor frequencies(const LlamaConfig& config, const at::Device& device) {
  const auto exponents = torch::arange(0, config.head_size(), 2, torch::TensorOptions().dtype(at::kFloat).device(device)) / static_cast<double>(config.head_size());
  const Tensor plain = 1.0 / torch::pow(config.rope_theta, exponents);
  const auto& scaling = config.rope_scaling;
  if (scaling.type == "default") return plain;
  const Tensor slow = plain / scaling.factor;
  if (scaling.type == "linear") return slow;
  const Tensor waves = static_cast<double>(scaling.original_max_position_embeddings) * plain / (2 * std::numbers::pi);  // periods within the original context
  const Tensor share = ((waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1);
  return (1 - share) * slow + share * plain;
}

LlamaContext make_context(const LlamaConfig& config, const Tensor& hidden, const Tensor& attention_mask, const Tensor& position_ids) {
  const int64_t tokens = hidden.size(1);
  const auto positions = position_ids.defined() ? position_ids : torch::arange(tokens, torch::TensorOptions().dtype(at::kLong).device(hidden.device())).unsqueeze(0);
  const auto angles = (positions.to(at::kFloat).unsqueeze(-1) * frequencies(config, hidden.device())).repeat({1, 1, 2}).unsqueeze(1);
  return {.cos = angles.cos().to(hidden.scalar_type()), .sin = angles.sin().to(hidden.scalar_type()), .mask = causal_mask(attention_mask, hidden)};
}

void check_inputs(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids) {
  std::ostringstream text;
  if (input_ids.dim() != 2 || (input_ids.scalar_type() != at::kLong && input_ids.scalar_type() != at::kInt)) {
    text << "LlamaModel::forward: input_ids has shape " << input_ids.sizes() << " and dtype " << input_ids.scalar_type() << ", expected [B, T] of int64.";
  } else if (attention_mask.defined() && attention_mask.sizes() != input_ids.sizes()) {
    text << "LlamaModel::forward: attention_mask has shape " << attention_mask.sizes() << ", but input_ids " << input_ids.sizes() << ". Both are [B, T].";
  } else if (position_ids.defined() && (position_ids.dim() != 2 || position_ids.size(1) != input_ids.size(1) || (position_ids.size(0) != 1 && position_ids.size(0) != input_ids.size(0)))) {
    text << "LlamaModel::forward: position_ids has shape " << position_ids.sizes() << ", but input_ids " << input_ids.sizes() << ", expected [B, T] or [1, T].";
  } else {
    return;
  }
  throw ShapeError(text.str());
}

const LlamaConfig& valid(const LlamaConfig& config) {
  config.validate();
  return config;
}

void initialize_all(torch::nn::Module& module, const LlamaConfig& config) {
  for (const auto& item : module.named_parameters()) initialize(item.key(), item.value(), config);
}

}  // namespace

void initialize(const std::string& name, Tensor parameter, const LlamaConfig& config) {
  const torch::NoGradGuard no_grad;
  if (name.ends_with("bias")) {
    parameter.zero_();
  } else if (name.ends_with("norm.weight")) {
    parameter.fill_(1);
  } else {
    parameter.normal_(0, config.initializer_range);
    if (name.ends_with("embed_tokens.weight") && config.pad_token_id) parameter[*config.pad_token_id].zero_();
  }
}

LlamaModelImpl::LlamaModelImpl(const LlamaConfig& config, Weights weights) : config_(valid(config)) {
  reset();
  if (weights == Weights::fresh) initialize_all(*this, config_);
}

void LlamaModelImpl::reset() {
  embed_tokens_ = register_module("embed_tokens", detail::make_embedding(config_.vocab_size, config_.hidden_size, config_.pad_token_id));
  layers_ = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < config_.num_hidden_layers; ++i) layers_->push_back(std::make_shared<detail::LlamaDecoderLayer>(config_));
  norm_ = register_module("norm", std::make_shared<detail::RmsNorm>(config_.hidden_size, config_.rms_norm_eps));
}

Tensor LlamaModelImpl::forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids) {
  check_inputs(input_ids, attention_mask, position_ids);
  Tensor hidden = embed_tokens_(input_ids);
  const auto context = make_context(config_, hidden, attention_mask, position_ids);
  for (const auto& layer : *layers_) hidden = layer->as<detail::LlamaDecoderLayer>()->forward(hidden, context);
  return norm_->forward(hidden);
}

LlamaForCausalLMImpl::LlamaForCausalLMImpl(const LlamaConfig& config, Weights weights) : config_(valid(config)) {
  reset();
  if (weights == Weights::fresh) initialize_all(*this, config_);
}

void LlamaForCausalLMImpl::reset() {
  model_ = register_module("model", LlamaModel(config_, Weights::uninitialized));
  if (!config_.tie_word_embeddings) lm_head_ = register_module("lm_head", std::make_shared<detail::Dense>(config_.hidden_size, config_.vocab_size, /*with_bias=*/false));
}

Tensor LlamaForCausalLMImpl::forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids) {
  const auto hidden = model_->forward(input_ids, attention_mask, position_ids);
  return lm_head_ ? lm_head_->forward(hidden) : at::linear(hidden, model_->embed_tokens()->weight);
}

}  // namespace accelerate::models
