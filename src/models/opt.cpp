#include <torch/torch.h>

#include "models/activations.hpp"
#include "models/architecture.hpp"
#include "models/attention.hpp"
#include "models/layers.hpp"
#include "models/refused_fields.hpp"
#include "models/rotary.hpp"
#include "models/token_inputs.hpp"

// OPT. Source: arXiv:2205.01068; the architecture as transformers has it. Registered names are Hugging Face's; they
// make the parameter names of the files.

namespace accelerate::models {
namespace {

using namespace detail;
using torch::Tensor;

struct OPTConfig {
  explicit OPTConfig(const JsonFile& file)
      : vocab_size(file.size("vocab_size", 50272)),
        hidden_size(file.size("hidden_size", 768)),
        word_size(file.size("word_embed_proj_dim", hidden_size)),
        layers(file.size("num_hidden_layers", 12)),
        heads(file.divisor("num_attention_heads", 12, "hidden_size", hidden_size)),
        ffn_dim(file.size("ffn_dim", 3072)),
        positions(file.size("max_position_embeddings", 2048)),
        norm_first(file.get("do_layer_norm_before", true)),
        final_norm(norm_first && !file.get("_remove_final_layer_norm", false)),
        norm_weights(file.get("layer_norm_elementwise_affine", true)),
        bias(file.get("enable_bias", true)),
        tied(file.get("tie_word_embeddings", true)),
        activation(read_activation(file, "activation_function", "relu")),
        dropout(file.probability("dropout", 0.1)),
        attention_dropout(file.probability("attention_dropout", 0)),
        layer_dropout(file.probability("layerdrop", 0)),
        deviation(file.get("init_std", 0.02)) {}

  int64_t vocab_size, hidden_size, word_size, layers, heads, ffn_dim, positions;
  bool norm_first, final_norm, norm_weights, bias, tied;
  Activation activation;
  double dropout, attention_dropout, layer_dropout, deviation;

  torch::nn::LayerNorm norm() const { return make_layer_norm(hidden_size, 1e-5, norm_weights); }
};

class OPTAttention : public torch::nn::Cloneable<OPTAttention> {
 public:
  OPTAttention(const OPTConfig& config, int64_t layer) : config_(config), layer_(layer) { reset(); }

  void reset() override {
    const auto projection = [&](const char* name) {
      return register_module(name, std::make_shared<Dense>(config_.hidden_size, config_.hidden_size, config_.bias));
    };
    k_proj_ = projection("k_proj");
    v_proj_ = projection("v_proj");
    q_proj_ = projection("q_proj");
    out_proj_ = projection("out_proj");
  }

  Tensor forward(const Tensor& hidden, const AttentionMask& mask, KeyValueCache* cache) {
    const auto heads = [&](const Tensor& x) { return split_heads(x, config_.hidden_size / config_.heads); };
    const auto [key, value] = remember(cache, layer_, heads(k_proj_->forward(hidden)), heads(v_proj_->forward(hidden)));
    return out_proj_->forward(attend(heads(q_proj_->forward(hidden)), key, value, mask,
                                     {.dropout = is_training() ? config_.attention_dropout : 0.0}));
  }

 private:
  OPTConfig config_;
  int64_t layer_;
  std::shared_ptr<Dense> k_proj_, v_proj_, q_proj_, out_proj_;
};

class OPTDecoderLayer : public torch::nn::Cloneable<OPTDecoderLayer>, public NoSplit {
 public:
  OPTDecoderLayer(const OPTConfig& config, int64_t layer) : config_(config), layer_(layer) { reset(); }

  void reset() override {
    self_attn_ = register_module("self_attn", std::make_shared<OPTAttention>(config_, layer_));
    self_attn_layer_norm_ = register_module("self_attn_layer_norm", config_.norm());
    fc1_ = register_module("fc1", std::make_shared<Dense>(config_.hidden_size, config_.ffn_dim, config_.bias));
    fc2_ = register_module("fc2", std::make_shared<Dense>(config_.ffn_dim, config_.hidden_size, config_.bias));
    final_layer_norm_ = register_module("final_layer_norm", config_.norm());
  }

  Tensor forward(const Tensor& hidden, const AttentionMask& mask, KeyValueCache* cache) {
    const auto attended =
        branch(hidden, self_attn_layer_norm_, [&](const Tensor& x) { return self_attn_->forward(x, mask, cache); });
    return branch(attended, final_layer_norm_,
                  [&](const Tensor& x) { return fc2_->forward(config_.activation(fc1_->forward(x))); });
  }

 private:
  /// The model of 350 million parameters normalises behind the sum, the others before the branch.
  template <class Body> Tensor branch(const Tensor& hidden, torch::nn::LayerNorm& norm, Body&& body) {
    const auto sum =
        hidden + torch::dropout(body(config_.norm_first ? norm(hidden) : hidden), config_.dropout, is_training());
    return config_.norm_first ? sum : norm(sum);
  }

  OPTConfig config_;
  int64_t layer_;
  std::shared_ptr<OPTAttention> self_attn_;
  std::shared_ptr<Dense> fc1_, fc2_;
  torch::nn::LayerNorm self_attn_layer_norm_ = nullptr, final_layer_norm_ = nullptr;
};

class OPTDecoder : public torch::nn::Cloneable<OPTDecoder> {
 public:
  explicit OPTDecoder(const OPTConfig& config) : config_(config) { reset(); }

  void reset() override {
    embed_tokens_ = register_module("embed_tokens", make_embedding(config_.vocab_size, config_.word_size));
    embed_positions_ =
        register_module("embed_positions", make_embedding(config_.positions + kFirstPosition, config_.hidden_size));
    if (config_.word_size != config_.hidden_size) {
      project_out_ = register_module(
          "project_out", std::make_shared<Dense>(config_.hidden_size, config_.word_size, /*with_bias=*/false));
      project_in_ = register_module(
          "project_in", std::make_shared<Dense>(config_.word_size, config_.hidden_size, /*with_bias=*/false));
    }
    if (config_.final_norm) final_layer_norm_ = register_module("final_layer_norm", config_.norm());
    layers_ = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < config_.layers; ++i) layers_->push_back(std::make_shared<OPTDecoderLayer>(config_, i));
  }

  Tensor forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                 KeyValueCache* cache) {
    const int64_t past = past_tokens(cache), tokens = input_ids.size(1);
    check_inputs({"OPTModel", input_ids, attention_mask, position_ids, past, config_.positions});
    Tensor hidden = embed_tokens_(input_ids);
    if (project_in_) hidden = project_in_->forward(hidden);
    hidden = hidden +
             embed_positions_(positions(attention_mask, position_ids, past, tokens, hidden.device()) + kFirstPosition);
    const auto mask = causal_mask(attention_mask, hidden, past);
    for (const auto& layer : *layers_)
      if (!is_training() || config_.layer_dropout == 0 || torch::rand({}).item<double>() >= config_.layer_dropout)
        hidden = layer->as<OPTDecoderLayer>()->forward(hidden, mask, cache);
    if (config_.final_norm) hidden = final_layer_norm_(hidden);
    return project_out_ ? project_out_->forward(hidden) : hidden;
  }

  const Tensor& words() const { return embed_tokens_->weight; }

 private:
  static constexpr int64_t kFirstPosition = 2;  // a relic of fairseq's padding ids

  /// Positions count tokens that are no padding; padding has -1.
  static Tensor positions(const Tensor& attention_mask, const Tensor& position_ids, int64_t past, int64_t tokens,
                          const at::Device& device) {
    if (position_ids.defined()) return position_ids;
    if (!attention_mask.defined()) return positions_from(past, tokens, device);
    const auto seen = attention_mask.ne(0).to(at::kLong);
    return (seen.cumsum(1) * seen - 1).narrow(1, past, tokens);
  }

  OPTConfig config_;
  torch::nn::Embedding embed_tokens_ = nullptr, embed_positions_ = nullptr;
  std::shared_ptr<Dense> project_out_, project_in_;
  torch::nn::LayerNorm final_layer_norm_ = nullptr;
  torch::nn::ModuleList layers_ = nullptr;
};

class OPTModel : public torch::nn::Cloneable<OPTModel> {
 public:
  explicit OPTModel(const OPTConfig& config) : config_(config) { reset(); }
  void reset() override { decoder_ = register_module("decoder", std::make_shared<OPTDecoder>(config_)); }
  OPTDecoder& decoder() { return *decoder_; }

 private:
  OPTConfig config_;
  std::shared_ptr<OPTDecoder> decoder_;
};

class OPTForCausalLM : public torch::nn::Cloneable<OPTForCausalLM> {
 public:
  explicit OPTForCausalLM(const OPTConfig& config) : config_(config) { reset(); }

  void reset() override {
    model_ = register_module("model", std::make_shared<OPTModel>(config_));
    if (!config_.tied)
      lm_head_ = register_module("lm_head",
                                 std::make_shared<Dense>(config_.word_size, config_.vocab_size, /*with_bias=*/false));
  }

  Tensor forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                 KeyValueCache* cache, int64_t logits_to_keep) {
    const auto hidden =
        last_tokens(model_->decoder().forward(input_ids, attention_mask, position_ids, cache), logits_to_keep);
    return lm_head_ ? lm_head_->forward(hidden) : project(hidden, model_->decoder().words());
  }

 private:
  OPTConfig config_;
  std::shared_ptr<OPTModel> model_;
  std::shared_ptr<Dense> lm_head_;  ///< Null where the embeddings are the head.
};

}  // namespace

Architecture build_opt(const std::filesystem::path& path, const std::string&) {
  const JsonFile file(path);
  refuse_foreign_fields(file);
  const OPTConfig config{file};
  const auto model = std::make_shared<OPTForCausalLM>(config);
  WeightRules rules{.names = formats::weight_names_of_type("opt"), .head_prefixes = {"lm_head."}};
  if (config.tied)
    rules.ignored_suffixes = {"lm_head.weight"},
    rules.tied_to = "model.decoder.embed_tokens.weight";  // a copy of the embeddings
  return {.module = model,
          .rules = rules,
          .initialize = initialize_normal(config.deviation),
          .causal = causal_forward(model),
          .max_positions = config.positions};
}

}  // namespace accelerate::models
