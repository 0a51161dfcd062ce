#include <torch/torch.h>

#include "models/activations.hpp"
#include "models/architecture.hpp"
#include "models/attention.hpp"
#include "models/check_field.hpp"
#include "models/layers.hpp"
#include "models/refused_fields.hpp"
#include "models/rope_config.hpp"
#include "models/rotary.hpp"
#include "models/token_inputs.hpp"
#include "utils/raise.hpp"

// GPT-NeoX and Pythia. Source: arXiv:2204.06745; the architecture as transformers has it. Registered names are those of
// the Hub's files.

namespace accelerate::models {
namespace {

using namespace detail;
using torch::Tensor;

struct GPTNeoXConfig {
  explicit GPTNeoXConfig(const JsonFile& file)
      : vocab_size(file.size("vocab_size", 50432)),
        hidden_size(file.size("hidden_size", 6144)),
        layers(file.size("num_hidden_layers", 44)),
        heads(file.divisor("num_attention_heads", 64, "hidden_size", hidden_size)),
        intermediate_size(file.size("intermediate_size", 24576)),
        parallel(file.get("use_parallel_residual", true)),
        attention_bias(file.get("attention_bias", true)),
        tied(file.get("tie_word_embeddings", false)),
        activation(read_activation(file, "hidden_act", "gelu")),
        attention_dropout(file.probability("attention_dropout", 0)),
        hidden_dropout(file.probability("hidden_dropout", 0)),
        norm_epsilon(file.get("layer_norm_eps", 1e-5)),
        deviation(file.get("initializer_range", 0.02)),
        positions(file.size("max_position_embeddings", 2048)),
        rotary_base(file.get("rotary_emb_base", 10000.0)) {
    double share = file.get("rotary_pct", 0.25);
    read_rope(file, positions, rope_scaling, rotary_base, share);
    rope_scaling.partial_rotary_factor = share;
    const int64_t size = file.size(
        "head_dim", head_size());  // transformers believes the field here, and nowhere else in this architecture
    const auto check_share = [&](bool good) {
      if (!good)
        file.fail("rotary_pct", share,
                  fmt::format("a share of the head's {} dimensions that pairs fit in", head_size()));
    };
    const double turned = static_cast<double>(size) * share;
    check_share(turned >= 0 && turned < static_cast<double>(int64_t{1} << 41));  // which an int64_t can hold
    // "proportional" turns all dimensions, most of them by nothing.
    rotary_dim = rope_scaling.type == "proportional" ? size : static_cast<int64_t>(turned);
    check_share(rotary_dim + rotary_dim % 2 <= head_size());
  }

  int64_t vocab_size, hidden_size, layers, heads, intermediate_size, rotary_dim = 0;
  bool parallel, attention_bias, tied;
  Activation activation;
  double attention_dropout, hidden_dropout, norm_epsilon, deviation;
  int64_t positions;
  double rotary_base;
  LlamaRopeScaling rope_scaling;

  void validate() const { rope_scaling.validate(rotary_dim); }
  int64_t head_size() const { return hidden_size / heads; }
  torch::nn::LayerNorm norm() const { return make_layer_norm(hidden_size, norm_epsilon); }
};

/// What all layers of one forward share.
struct GPTNeoXContext {
  Rotary rotary;
  AttentionMask mask;
  KeyValueCache* cache;
};

class GPTNeoXAttention : public torch::nn::Cloneable<GPTNeoXAttention> {
 public:
  GPTNeoXAttention(const GPTNeoXConfig& config, int64_t layer) : config_(config), layer_(layer) { reset(); }

  void reset() override {
    query_key_value_ =
        register_module("query_key_value",
                        std::make_shared<Dense>(config_.hidden_size, 3 * config_.hidden_size, config_.attention_bias));
    dense_ = register_module("dense",
                             std::make_shared<Dense>(config_.hidden_size, config_.hidden_size, config_.attention_bias));
  }

  Tensor forward(const Tensor& hidden, const GPTNeoXContext& context) {
    // Each head's query, key and value lie together.
    const auto parts = split_heads(query_key_value_->forward(hidden), 3 * config_.head_size()).chunk(3, -1);
    const auto [key, value] = remember(context.cache, layer_, context.rotary.rotate(parts[1]), parts[2]);
    return dense_->forward(attend(context.rotary.rotate(parts[0]), key, value, context.mask,
                                  {.dropout = is_training() ? config_.attention_dropout : 0.0}));
  }

 private:
  GPTNeoXConfig config_;
  int64_t layer_;
  std::shared_ptr<Dense> query_key_value_, dense_;
};

class GPTNeoXMLP : public torch::nn::Cloneable<GPTNeoXMLP> {
 public:
  explicit GPTNeoXMLP(const GPTNeoXConfig& config) : config_(config) { reset(); }

  void reset() override {
    dense_h_to_4h_ =
        register_module("dense_h_to_4h", std::make_shared<Dense>(config_.hidden_size, config_.intermediate_size));
    dense_4h_to_h_ =
        register_module("dense_4h_to_h", std::make_shared<Dense>(config_.intermediate_size, config_.hidden_size));
  }
  Tensor forward(const Tensor& hidden) {
    return dense_4h_to_h_->forward(config_.activation(dense_h_to_4h_->forward(hidden)));
  }

 private:
  GPTNeoXConfig config_;
  std::shared_ptr<Dense> dense_h_to_4h_, dense_4h_to_h_;
};

class GPTNeoXLayer : public torch::nn::Cloneable<GPTNeoXLayer>, public NoSplit {
 public:
  GPTNeoXLayer(const GPTNeoXConfig& config, int64_t layer) : config_(config), layer_(layer) { reset(); }

  void reset() override {
    input_layernorm_ = register_module("input_layernorm", config_.norm());
    post_attention_layernorm_ = register_module("post_attention_layernorm", config_.norm());
    attention_ = register_module("attention", std::make_shared<GPTNeoXAttention>(config_, layer_));
    mlp_ = register_module("mlp", std::make_shared<GPTNeoXMLP>(config_));
  }

  Tensor forward(const Tensor& hidden, const GPTNeoXContext& context) {
    const auto dropped = [&](const Tensor& x) { return torch::dropout(x, config_.hidden_dropout, is_training()); };
    const auto attended = hidden + dropped(attention_->forward(input_layernorm_(hidden), context));
    return attended + dropped(mlp_->forward(post_attention_layernorm_(config_.parallel ? hidden : attended)));
  }

 private:
  GPTNeoXConfig config_;
  int64_t layer_;
  torch::nn::LayerNorm input_layernorm_ = nullptr, post_attention_layernorm_ = nullptr;
  std::shared_ptr<GPTNeoXAttention> attention_;
  std::shared_ptr<GPTNeoXMLP> mlp_;
};

class GPTNeoXModel : public torch::nn::Cloneable<GPTNeoXModel> {
 public:
  explicit GPTNeoXModel(const GPTNeoXConfig& config) : config_(config) { reset(); }

  void reset() override {
    embed_in_ = register_module("embed_in", make_embedding(config_.vocab_size, config_.hidden_size));
    layers_ = register_module("layers", torch::nn::ModuleList());
    for (int64_t i = 0; i < config_.layers; ++i) layers_->push_back(std::make_shared<GPTNeoXLayer>(config_, i));
    final_layer_norm_ = register_module("final_layer_norm", config_.norm());
  }

  Tensor forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                 KeyValueCache* cache) {
    const int64_t past = past_tokens(cache);
    check_inputs({"GPTNeoXModel", input_ids, attention_mask, position_ids, past, std::nullopt});
    Tensor hidden = torch::dropout(embed_in_(input_ids), config_.hidden_dropout, is_training());
    const GPTNeoXContext context{
        .rotary = stretched_rotary({config_.rotary_dim, config_.rotary_base, config_.positions}, config_.rope_scaling,
                                   position_ids, past, hidden),
        .mask = causal_mask(attention_mask, hidden, past),
        .cache = cache};
    for (const auto& layer : *layers_) hidden = layer->as<GPTNeoXLayer>()->forward(hidden, context);
    return final_layer_norm_(hidden);
  }

  const Tensor& words() const { return embed_in_->weight; }

 private:
  GPTNeoXConfig config_;
  torch::nn::Embedding embed_in_ = nullptr;
  torch::nn::ModuleList layers_ = nullptr;
  torch::nn::LayerNorm final_layer_norm_ = nullptr;
};

class GPTNeoXForCausalLM : public torch::nn::Cloneable<GPTNeoXForCausalLM> {
 public:
  explicit GPTNeoXForCausalLM(const GPTNeoXConfig& config) : config_(config) { reset(); }

  void reset() override {
    gpt_neox_ = register_module("gpt_neox", std::make_shared<GPTNeoXModel>(config_));
    if (!config_.tied)
      embed_out_ = register_module(
          "embed_out", std::make_shared<Dense>(config_.hidden_size, config_.vocab_size, /*with_bias=*/false));
  }

  Tensor forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                 KeyValueCache* cache, int64_t logits_to_keep) {
    const auto hidden = last_tokens(gpt_neox_->forward(input_ids, attention_mask, position_ids, cache), logits_to_keep);
    return embed_out_ ? embed_out_->forward(hidden) : project(hidden, gpt_neox_->words());
  }

 private:
  GPTNeoXConfig config_;
  std::shared_ptr<GPTNeoXModel> gpt_neox_;
  std::shared_ptr<Dense> embed_out_;  ///< Null where the embeddings are the head.
};

}  // namespace

Architecture build_gpt_neox(const std::filesystem::path& path, const std::string&) {
  const JsonFile file(path);
  refuse_foreign_fields(file);
  const auto config = validated(GPTNeoXConfig{file}, path);
  const auto model = std::make_shared<GPTNeoXForCausalLM>(config);
  WeightRules rules{.names = formats::weight_names_of_type("gpt_neox"),
                    .head_prefixes = {"embed_out."},
                    .ignored_suffixes = {".attention.bias", ".attention.masked_bias",
                                         "rotary_emb.inv_freq"}};  // worked out anew; old files have them
  if (config.tied)
    rules.tied_to = "gpt_neox.embed_in.weight",
    rules.ignored_suffixes.insert(rules.ignored_suffixes.end(), {"embed_out.weight", "lm_head.weight"});
  return {.module = model,
          .rules = rules,
          .initialize = initialize_normal(config.deviation),
          .causal = causal_forward(model),
          .max_positions = config.positions};
}

}  // namespace accelerate::models
