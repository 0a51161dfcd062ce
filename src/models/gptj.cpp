#include <torch/torch.h>

#include "models/activations.hpp"
#include "models/architecture.hpp"
#include "models/attention.hpp"
#include "models/layers.hpp"
#include "models/refused_fields.hpp"
#include "models/rotary.hpp"
#include "models/token_inputs.hpp"
#include "utils/raise.hpp"

// GPT-J. Source: Wang and Komatsuzaki, "GPT-J-6B"; the architecture as transformers has it. Registered names are
// Hugging Face's; they make the parameter names of the files.

namespace accelerate::models {
namespace {

using namespace detail;
using torch::Tensor;

struct GPTJConfig {
  explicit GPTJConfig(const JsonFile& file)
      : vocab_size(file.size("vocab_size", 50400)),
        positions(file.size("n_positions", 2048)),
        hidden_size(file.size("n_embd", 4096)),
        layers(file.size("n_layer", 28)),
        heads(file.divisor("n_head", 16, "n_embd", hidden_size)),
        rotary_dim(file.is_null("rotary_dim") ? hidden_size : file.size("rotary_dim", 64)),
        inner_size(file.size("n_inner", 4 * hidden_size)),
        tied(file.get("tie_word_embeddings", false)),
        activation(read_activation(file, "activation_function", "gelu_new")),
        residual_dropout(file.probability("resid_pdrop", 0)),
        embedding_dropout(file.probability("embd_pdrop", 0)),
        attention_dropout(file.probability("attn_pdrop", 0)),
        norm_epsilon(file.get("layer_norm_epsilon", 1e-5)),
        deviation(file.get("initializer_range", 0.02)) {
    if (rotary_dim % 2 != 0 || rotary_dim > head_size())
      file.fail("rotary_dim", rotary_dim,
                fmt::format("an even number up to n_embd / n_head, which is {}", head_size()));
  }

  int64_t vocab_size, positions, hidden_size, layers, heads, rotary_dim, inner_size;
  bool tied;
  Activation activation;
  double residual_dropout, embedding_dropout, attention_dropout, norm_epsilon, deviation;

  int64_t head_size() const { return hidden_size / heads; }
};

/// What all layers of one forward share.
struct GPTJContext {
  Rotary rotary;
  AttentionMask mask;
  KeyValueCache* cache;
};

class GPTJAttention : public torch::nn::Cloneable<GPTJAttention> {
 public:
  GPTJAttention(const GPTJConfig& config, int64_t layer) : config_(config), layer_(layer) { reset(); }

  void reset() override {
    const auto projection = [&](const char* name) {
      return register_module(name,
                             std::make_shared<Dense>(config_.hidden_size, config_.hidden_size, /*with_bias=*/false));
    };
    k_proj_ = projection("k_proj");
    v_proj_ = projection("v_proj");
    q_proj_ = projection("q_proj");
    out_proj_ = projection("out_proj");
  }

  Tensor forward(const Tensor& hidden, const GPTJContext& context) {
    const auto heads = [&](const Tensor& x) { return split_heads(x, config_.head_size()); };
    const auto query = context.rotary.rotate(heads(q_proj_->forward(hidden)));
    const auto [key, value] = remember(context.cache, layer_, context.rotary.rotate(heads(k_proj_->forward(hidden))),
                                       heads(v_proj_->forward(hidden)));
    const auto attended =
        attend(query, key, value, context.mask, {.dropout = is_training() ? config_.attention_dropout : 0.0});
    return torch::dropout(out_proj_->forward(attended), config_.residual_dropout, is_training());
  }

 private:
  GPTJConfig config_;
  int64_t layer_;
  std::shared_ptr<Dense> k_proj_, v_proj_, q_proj_, out_proj_;
};

class GPTJMLP : public torch::nn::Cloneable<GPTJMLP> {
 public:
  explicit GPTJMLP(const GPTJConfig& config) : config_(config) { reset(); }

  void reset() override {
    fc_in_ = register_module("fc_in", std::make_shared<Dense>(config_.hidden_size, config_.inner_size));
    fc_out_ = register_module("fc_out", std::make_shared<Dense>(config_.inner_size, config_.hidden_size));
  }
  Tensor forward(const Tensor& hidden) {
    return torch::dropout(fc_out_->forward(config_.activation(fc_in_->forward(hidden))), config_.residual_dropout,
                          is_training());
  }

 private:
  GPTJConfig config_;
  std::shared_ptr<Dense> fc_in_, fc_out_;
};

/// Attention and MLP side by side, behind one norm.
class GPTJBlock : public torch::nn::Cloneable<GPTJBlock>, public NoSplit {
 public:
  GPTJBlock(const GPTJConfig& config, int64_t layer) : config_(config), layer_(layer) { reset(); }

  void reset() override {
    ln_1_ = register_module("ln_1", make_layer_norm(config_.hidden_size, config_.norm_epsilon));
    attn_ = register_module("attn", std::make_shared<GPTJAttention>(config_, layer_));
    mlp_ = register_module("mlp", std::make_shared<GPTJMLP>(config_));
  }

  Tensor forward(const Tensor& hidden, const GPTJContext& context) {
    const auto normal = ln_1_(hidden);
    return attn_->forward(normal, context) + mlp_->forward(normal) + hidden;
  }

 private:
  GPTJConfig config_;
  int64_t layer_;
  torch::nn::LayerNorm ln_1_ = nullptr;
  std::shared_ptr<GPTJAttention> attn_;
  std::shared_ptr<GPTJMLP> mlp_;
};

class GPTJModel : public torch::nn::Cloneable<GPTJModel> {
 public:
  explicit GPTJModel(const GPTJConfig& config) : config_(config) { reset(); }

  void reset() override {
    wte_ = register_module("wte", make_embedding(config_.vocab_size, config_.hidden_size));
    h_ = register_module("h", torch::nn::ModuleList());
    for (int64_t i = 0; i < config_.layers; ++i) h_->push_back(std::make_shared<GPTJBlock>(config_, i));
    ln_f_ = register_module("ln_f", make_layer_norm(config_.hidden_size, config_.norm_epsilon));
  }

  Tensor forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                 KeyValueCache* cache) {
    const int64_t past = past_tokens(cache);
    check_inputs({"GPTJModel", input_ids, attention_mask, position_ids, past, config_.positions});
    Tensor hidden = torch::dropout(wte_(input_ids), config_.embedding_dropout, is_training());
    const auto positions =
        position_ids.defined() ? position_ids : positions_from(past, input_ids.size(1), input_ids.device());
    const GPTJContext context{.rotary = {positions,
                                         {rotary_frequencies(config_.rotary_dim, 10000, hidden.device())},
                                         hidden.scalar_type(),
                                         Rotary::Pairs::neighbours},
                              .mask = causal_mask(attention_mask, hidden, past),
                              .cache = cache};
    for (const auto& block : *h_) hidden = block->as<GPTJBlock>()->forward(hidden, context);
    return ln_f_(hidden);
  }

  const Tensor& words() const { return wte_->weight; }

 private:
  GPTJConfig config_;
  torch::nn::Embedding wte_ = nullptr;
  torch::nn::ModuleList h_ = nullptr;
  torch::nn::LayerNorm ln_f_ = nullptr;
};

/// What a head has of its own whose weights are the embeddings.
class GPTJHeadBias : public torch::nn::Cloneable<GPTJHeadBias> {
 public:
  explicit GPTJHeadBias(int64_t size) : size_(size) { reset(); }
  void reset() override { bias = register_parameter("bias", torch::empty({size_})); }
  Tensor bias;

 private:
  int64_t size_;
};

class GPTJForCausalLM : public torch::nn::Cloneable<GPTJForCausalLM> {
 public:
  explicit GPTJForCausalLM(const GPTJConfig& config) : config_(config) { reset(); }

  void reset() override {
    transformer_ = register_module("transformer", std::make_shared<GPTJModel>(config_));
    if (!config_.tied)
      lm_head_ = register_module("lm_head", std::make_shared<Dense>(config_.hidden_size, config_.vocab_size));
    else tied_head_ = register_module("lm_head", std::make_shared<GPTJHeadBias>(config_.vocab_size));
  }

  Tensor forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                 KeyValueCache* cache, int64_t logits_to_keep) {
    const auto hidden =
        last_tokens(transformer_->forward(input_ids, attention_mask, position_ids, cache), logits_to_keep);
    return lm_head_ ? lm_head_->forward(hidden) : project(hidden, transformer_->words(), tied_head_->bias);
  }

 private:
  GPTJConfig config_;
  std::shared_ptr<GPTJModel> transformer_;
  std::shared_ptr<Dense> lm_head_;  ///< One of these two.
  std::shared_ptr<GPTJHeadBias> tied_head_;
};

}  // namespace

Architecture build_gptj(const std::filesystem::path& path, const std::string&) {
  JsonFile file(path);
  file.rename({{"hidden_size", "n_embd"},
               {"num_hidden_layers", "n_layer"},
               {"num_attention_heads", "n_head"},
               {"max_position_embeddings", "n_positions"}});
  refuse_foreign_fields(file);
  const GPTJConfig config{file};
  const auto model = std::make_shared<GPTJForCausalLM>(config);
  WeightRules rules{.names = formats::weight_names_of_type("gptj"),
                    .head_prefixes = {"lm_head."},
                    .ignored_suffixes = {".attn.bias", ".attn.masked_bias", ".attn.embed_positions"}};
  if (config.tied) rules.ignored_suffixes.emplace_back("lm_head.weight"), rules.tied_to = "transformer.wte.weight";
  return {.module = model,
          .rules = rules,
          .initialize = initialize_normal(config.deviation),
          .causal = causal_forward(model),
          .max_positions = config.positions};
}

}  // namespace accelerate::models
