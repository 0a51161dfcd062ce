#include "accelerate/models/llama.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "models/activations.hpp"
#include "models/architecture.hpp"
#include "models/attention.hpp"
#include "models/check_field.hpp"
#include "models/direct_rows.hpp"
#include "models/layers.hpp"
#include "models/llama_config.hpp"
#include "models/mixtral.hpp"
#include "models/rotary.hpp"
#include "models/token_inputs.hpp"

// Registered names are Hugging Face's; they make the parameter names of the files.

namespace accelerate::models {
namespace detail {

using torch::Tensor;

template <class... Layers>
std::optional<std::array<DirectWeight, sizeof...(Layers)>> direct_weights(const Layers&... layers) {
  const std::array found{direct_weight(layers->weight(), layers->bias())...};
  if (!std::all_of(found.begin(), found.end(), [](const auto& weight) { return weight.has_value(); })) return {};
  std::array<DirectWeight, sizeof...(Layers)> weights;
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = *found[i];
  return weights;
}

/// The tensors that all layers of one forward share.
struct LlamaContext {
  Rotary rotary;
  AttentionMask mask, window_mask;  ///< For layers that see all tokens before, and for those that see the last few.
  KeyValueCache* cache;
  std::optional<Rotary::Row> row;  ///< of one token that may go through layers directly; they change it in place
};

class LlamaAttention : public torch::nn::Cloneable<LlamaAttention> {
 public:
  LlamaAttention(const LlamaConfig& config, int64_t layer)
      : Cloneable(config.family() + "Attention"), config_(config), layer_(layer) {
    reset();
  }

  void reset() override {
    const int64_t size = config_.head_size(), all = config_.num_attention_heads * size,
                  shared = config_.key_value_heads() * size;
    const bool bias = config_.attention_bias || config_.qkv_bias;
    q_proj_ = register_module("q_proj", std::make_shared<Dense>(config_.hidden_size, all, bias));
    k_proj_ = register_module("k_proj", std::make_shared<Dense>(config_.hidden_size, shared, bias));
    v_proj_ = register_module("v_proj", std::make_shared<Dense>(config_.hidden_size, shared, bias));
    o_proj_ = register_module("o_proj", std::make_shared<Dense>(all, config_.hidden_size, config_.attention_bias));
  }

  /// The weights of this layer, in the order of their names above; none where a row can't go through directly.
  std::optional<std::array<DirectWeight, 4>> direct() const {
    return direct_weights(q_proj_, k_proj_, v_proj_, o_proj_);
  }

  Tensor forward(const Tensor& hidden, const LlamaContext& context) {
    const int64_t size = config_.head_size(), queries = config_.num_attention_heads;
    // One turn for queries and keys: while decoding, time goes by the number of operators.
    const auto turned =
        context.rotary.rotate(split_heads(at::cat({q_proj_->forward(hidden), k_proj_->forward(hidden)}, -1), size));
    const auto [key, value] = remember(context.cache, layer_, turned.narrow(1, queries, config_.key_value_heads()),
                                       split_heads(v_proj_->forward(hidden), size));
    const auto& mask = config_.slides(layer_) ? context.window_mask : context.mask;
    return o_proj_->forward(attend(turned.narrow(1, 0, queries), key, value, mask,
                                   {.dropout = is_training() ? config_.attention_dropout : 0.0}));
  }

 private:
  LlamaConfig config_;
  int64_t layer_;
  std::shared_ptr<Dense> q_proj_, k_proj_, v_proj_, o_proj_;
};

/// SwiGLU. Source: arXiv:2002.05202.
class LlamaMLP : public torch::nn::Cloneable<LlamaMLP> {
 public:
  explicit LlamaMLP(const LlamaConfig& config)
      : Cloneable(config.family() + "MLP"), config_(config), activation_(find_activation(config.hidden_act).value()) {
    reset();
  }

  void reset() override {
    gate_proj_ = register_module(
        "gate_proj", std::make_shared<Dense>(config_.hidden_size, config_.intermediate_size, config_.mlp_bias));
    up_proj_ = register_module(
        "up_proj", std::make_shared<Dense>(config_.hidden_size, config_.intermediate_size, config_.mlp_bias));
    down_proj_ = register_module(
        "down_proj", std::make_shared<Dense>(config_.intermediate_size, config_.hidden_size, config_.mlp_bias));
  }

  /// As LlamaAttention::direct().
  std::optional<std::array<DirectWeight, 3>> direct() const {
    if (activation_ != find_activation("silu")) return std::nullopt;
    return direct_weights(gate_proj_, up_proj_, down_proj_);
  }

  Tensor forward(const Tensor& hidden) {
    return down_proj_->forward(activation_(gate_proj_->forward(hidden)) * up_proj_->forward(hidden));
  }

 private:
  LlamaConfig config_;
  Activation activation_;
  std::shared_ptr<Dense> gate_proj_, up_proj_, down_proj_;
};

class LlamaDecoderLayer : public torch::nn::Cloneable<LlamaDecoderLayer>, public NoSplit {
 public:
  LlamaDecoderLayer(const LlamaConfig& config, int64_t layer)
      : Cloneable(config.family() + "DecoderLayer"), config_(config), layer_(layer) {
    reset();
  }

  void reset() override {
    self_attn_ = register_module("self_attn", std::make_shared<LlamaAttention>(config_, layer_));
    if (config_.num_local_experts) {
      experts_ = register_module("block_sparse_moe", std::make_shared<MixtralSparseMoeBlock>(config_));
    } else {
      mlp_ = register_module("mlp", std::make_shared<LlamaMLP>(config_));
    }
    input_layernorm_ =
        register_module("input_layernorm", std::make_shared<RmsNorm>(config_.hidden_size, config_.rms_norm_eps));
    post_attention_layernorm_ = register_module("post_attention_layernorm",
                                                std::make_shared<RmsNorm>(config_.hidden_size, config_.rms_norm_eps));
  }

  Tensor forward(const Tensor& hidden, const LlamaContext& context) {
    if (context.row && forward_row(hidden, context)) return hidden;
    const auto attended = hidden + self_attn_->forward(input_layernorm_->forward(hidden), context);
    const auto normal = post_attention_layernorm_->forward(attended);
    return attended + (experts_ ? experts_->forward(normal) : mlp_->forward(normal));
  }

 private:
  /// @return false, with nothing done, where a weight is not at hand
  bool forward_row(const Tensor& hidden, const LlamaContext& context) {
    const auto* const before = direct_numbers(input_layernorm_->weight());
    const auto* const between = direct_numbers(post_attention_layernorm_->weight());
    if (!before || !between || !mlp_) return false;
    const auto attention = self_attn_->direct();
    const auto mlp = attention ? mlp_->direct() : std::nullopt;
    if (!mlp) return false;
    // Numbers go by operators, which round as for weights that come and go: a model offloaded in parts says the same.
    const auto in_few_bits = [](const DirectWeight& weight) { return weight.packed != nullptr; };
    if (!std::ranges::all_of(*attention, in_few_bits) || !std::ranges::all_of(*mlp, in_few_bits)) return false;
    const int64_t width = config_.hidden_size, size = config_.head_size(), queries = config_.num_attention_heads,
                  groups = config_.key_value_heads(), inner = config_.intermediate_size;
    const auto kept = context.cache->append_row(layer_, groups, size);
    if (!kept) return false;
    std::vector<float> memory(static_cast<size_t>(width + (2 * queries + 2 * groups) * size + 2 * inner));
    float *const normal = memory.data(), *const query = normal + width, *const key = query + queries * size,
                 *const value = key + groups * size, *const attended = value + groups * size,
                 *const gate = attended + queries * size, *const up = gate + inner,
                 *const x = hidden.mutable_data_ptr<float>();
    norm_row(x, before, input_layernorm_->eps(), width, normal);
    const auto& [q, k, v, o] = *attention;
    multiply_row(normal, {{q, query}, {k, key}, {v, value}});
    turn_row(query, queries + groups, size, context.row->cosines, context.row->sines, context.row->turned);
    for (int64_t head = 0; head < groups; ++head) {
      const int64_t place = (head * kept->capacity + kept->tokens - 1) * size;
      std::copy_n(key + head * size, size, kept->keys + place);
      std::copy_n(value + head * size, size, kept->values + place);
    }
    attend_row(query,
               {.keys = kept->keys,
                .values = kept->values,
                .capacity = kept->capacity,
                .tokens = kept->tokens,
                .heads = queries,
                .groups = groups,
                .size = size,
                .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)))},
               attended);
    multiply_row(attended, {{o, x, true}});
    norm_row(x, between, post_attention_layernorm_->eps(), width, normal);
    multiply_row(normal, {{(*mlp)[0], gate}, {(*mlp)[1], up}});
    gate_row(gate, up, inner);
    multiply_row(gate, {{(*mlp)[2], x, true}});
    return true;
  }

  LlamaConfig config_;
  int64_t layer_;
  std::shared_ptr<LlamaAttention> self_attn_;
  std::shared_ptr<LlamaMLP> mlp_;  ///< One of these two.
  std::shared_ptr<MixtralSparseMoeBlock> experts_;
  std::shared_ptr<RmsNorm> input_layernorm_, post_attention_layernorm_;
};

}  // namespace detail

using torch::Tensor;

void initialize(const std::string& name, const Tensor& parameter, const LlamaConfig& config) {
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

LlamaModelImpl::LlamaModelImpl(const LlamaConfig& config, Weights weights)
    : Cloneable(config.family() + "Model"), config_(valid(config)) {
  reset();
  if (weights == Weights::fresh) initialize_all(*this, config_);
}

void LlamaModelImpl::reset() {
  embed_tokens_ = register_module(
      "embed_tokens", detail::make_embedding(config_.vocab_size, config_.hidden_size, config_.pad_token_id));
  layers_ = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < config_.num_hidden_layers; ++i)
    layers_->push_back(std::make_shared<detail::LlamaDecoderLayer>(config_, i));
  norm_ = register_module("norm", std::make_shared<detail::RmsNorm>(config_.hidden_size, config_.rms_norm_eps));
}

Tensor LlamaModelImpl::forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                               KeyValueCache* cache) {
  const int64_t past = detail::past_tokens(cache);
  check_inputs({config_.family() + "Model", input_ids, attention_mask, position_ids, past, std::nullopt});
  Tensor hidden = embed_tokens_(input_ids);
  const auto window_mask =
      config_.sliding_window ? causal_mask(attention_mask, hidden, past, config_.sliding_window) : AttentionMask();
  detail::LlamaContext context{
      .rotary = detail::stretched_rotary({config_.head_size(), config_.rope_theta, config_.max_position_embeddings},
                                         config_.rope_scaling, position_ids, past, hidden),
      .mask = causal_mask(attention_mask, hidden, past),
      .window_mask = window_mask,
      .cache = cache,
      .row = {}};
  if (cache && past > 0 && hidden.numel() == config_.hidden_size && detail::direct_numbers(hidden) &&
      !context.mask.added.defined() && !context.window_mask.added.defined() && !is_training() &&
      detail::rows_go_directly())
    context.row = context.rotary.row();
  for (const auto& layer : *layers_) hidden = layer->as<detail::LlamaDecoderLayer>()->forward(hidden, context);
  return norm_->forward(hidden);
}

LlamaForCausalLMImpl::LlamaForCausalLMImpl(const LlamaConfig& config, Weights weights)
    : Cloneable(config.family() + "ForCausalLM"), config_(valid(config)) {
  reset();
  if (weights == Weights::fresh) initialize_all(*this, config_);
}

std::optional<int64_t> LlamaForCausalLMImpl::max_positions() const {
  if (config_.rope_scaling.type == "dynamic") return std::nullopt;
  return config_.max_position_embeddings;
}

void LlamaForCausalLMImpl::reset() {
  model_ = register_module("model", LlamaModel(config_, Weights::uninitialized));
  if (!config_.tie_word_embeddings)
    lm_head_ = register_module(
        "lm_head", std::make_shared<detail::Dense>(config_.hidden_size, config_.vocab_size, /*with_bias=*/false));
}

Tensor LlamaForCausalLMImpl::forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                                     KeyValueCache* cache, int64_t logits_to_keep) {
  const auto hidden =
      detail::last_tokens(model_->forward(input_ids, attention_mask, position_ids, cache), logits_to_keep);
  return lm_head_ ? lm_head_->forward(hidden) : detail::project(hidden, model_->embed_tokens()->weight);
}

}  // namespace accelerate::models
