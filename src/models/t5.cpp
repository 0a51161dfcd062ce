#include <cmath>

#include <torch/torch.h>

#include "models/activations.hpp"
#include "models/architecture.hpp"
#include "models/attention.hpp"
#include "models/layers.hpp"
#include "models/refused_fields.hpp"
#include "models/token_inputs.hpp"
#include "utils/raise.hpp"

// T5, 1.0 and 1.1. Source: arXiv:1910.10683; the architecture as transformers has it. Registered names are Hugging
// Face's; they make the parameter names of the files. Shapes: B batch, T tokens, H heads, D d_model.

namespace accelerate::models {
namespace {

using namespace detail;
using torch::Tensor;

struct T5Config {
  explicit T5Config(const JsonFile& file)
      : vocab_size(file.size("vocab_size", 32128)),
        d_model(file.size("d_model", 512)),
        d_kv(file.size("d_kv", 64)),
        d_ff(file.size("d_ff", 2048)),
        layers(
            file.size("num_hidden_layers",
                      file.size("num_layers",
                                6))),  // two names of one field, but the decoder follows the second, as in transformers
        decoder_layers(file.size("num_decoder_layers", file.size("num_layers", 6))),
        heads(file.size("num_heads", 8)),
        buckets(file.size("relative_attention_num_buckets", 32)),
        max_distance(file.size("relative_attention_max_distance", 128)),
        dropout(file.probability("dropout_rate", 0.1)),
        norm_epsilon(file.get("layer_norm_epsilon", 1e-6)),
        factor(file.get("initializer_factor", 1.0)),
        // Version 1.0 scales the decoder's output and uses the embeddings as its head, 1.1 does neither. transformers 5
        // writes the first field, earlier versions only the second.
        scales_output(file.get("scale_decoder_outputs", file.get("tie_word_embeddings", true))),
        tied(scales_output && file.get("tie_word_embeddings", true)) {
    if (buckets < 4 || max_distance <= buckets / 2)
      file.fail("relative_attention_num_buckets", buckets,
                "4 or more, and less than twice relative_attention_max_distance");
    auto name = file.get("feed_forward_proj", "relu");
    gated = name.starts_with("gated-");
    if (gated) name.erase(0, std::string_view("gated-").size());
    if (gated && name == "gelu") name = "gelu_new";  // as in transformers
    // transformers works this out of that field and writes it too, and believes it when it reads it.
    file.read("is_gated_act", gated);
    const char* const key = file.root().contains("dense_act_fn") ? "dense_act_fn" : "feed_forward_proj";
    file.read("dense_act_fn", name);
    const auto found = find_activation(name);
    if (!found)
      file.fail(key, name,
                fmt::format("one of {}, or in feed_forward_proj the same with gated- before it", known_activations()));
    activation = *found;
  }

  int64_t vocab_size, d_model, d_kv, d_ff, layers, decoder_layers, heads, buckets, max_distance;
  double dropout, norm_epsilon, factor;
  bool scales_output, tied, gated = false;
  Activation activation = nullptr;

  std::shared_ptr<RmsNorm> norm() const { return std::make_shared<RmsNorm>(d_model, norm_epsilon); }
};

/// Which of the two stacks a layer belongs to.
enum class Side { encoder, decoder };

/// The number of a distance between two tokens: small distances have one each, larger ones share, all above
/// max_distance one. @param distances  key - query, of int64
Tensor buckets_of(const T5Config& config, Side side, Tensor distances) {
  int64_t count = config.buckets;
  auto first = torch::zeros_like(distances);
  if (side == Side::encoder) {
    count /= 2;
    first = distances.gt(0).to(at::kLong) * count;
    distances = distances.abs();
  } else {
    distances = -distances.clamp_max(0);
  }
  const int64_t exact = count / 2;
  const double scale = static_cast<double>(count - exact) /
                       std::log(static_cast<double>(config.max_distance) / static_cast<double>(exact));
  // The clamp keeps the logarithm of 0 away from the conversion; `where` takes the other branch there.
  const auto shared =
      (exact + (distances.clamp_min(1).to(at::kFloat) / static_cast<double>(exact)).log().mul(scale).to(at::kLong))
          .clamp_max(count - 1);
  return first + torch::where(distances < exact, distances, shared);
}

class T5Attention : public torch::nn::Cloneable<T5Attention> {
 public:
  T5Attention(const T5Config& config, Side side, bool has_bias) : config_(config), side_(side), has_bias_(has_bias) {
    reset();
  }

  void reset() override {
    const int64_t inner = config_.heads * config_.d_kv;
    q_ = register_module("q", std::make_shared<Dense>(config_.d_model, inner, /*with_bias=*/false));
    k_ = register_module("k", std::make_shared<Dense>(config_.d_model, inner, /*with_bias=*/false));
    v_ = register_module("v", std::make_shared<Dense>(config_.d_model, inner, /*with_bias=*/false));
    o_ = register_module("o", std::make_shared<Dense>(inner, config_.d_model, /*with_bias=*/false));
    if (has_bias_)
      relative_attention_bias_ =
          register_module("relative_attention_bias", make_embedding(config_.buckets, config_.heads));
  }

  /// [B, T, D] -> keys and values, [B, H, T, d_kv] each
  std::pair<Tensor, Tensor> keys_and_values(const Tensor& hidden) {
    return {split_heads(k_->forward(hidden), config_.d_kv), split_heads(v_->forward(hidden), config_.d_kv)};
  }

  Tensor forward(const Tensor& hidden, const std::pair<Tensor, Tensor>& seen, const AttentionMask& mask) {
    return o_->forward(attend(split_heads(q_->forward(hidden), config_.d_kv), seen.first, seen.second, mask,
                              {.scale = 1.0, .dropout = is_training() ? config_.dropout : 0.0}));
  }

  /// The bias that distances add to the scores of `tokens` queries behind `past` tokens, [1, H, T, S + T].
  Tensor bias(int64_t past, int64_t tokens) {
    const auto options = relative_attention_bias_->weight.options().dtype(at::kLong).requires_grad(false);
    const auto distances =
        torch::arange(past + tokens, options).unsqueeze(0) - torch::arange(past, past + tokens, options).unsqueeze(1);
    return relative_attention_bias_(buckets_of(config_, side_, distances)).permute({2, 0, 1}).unsqueeze(0);
  }

 private:
  T5Config config_;
  Side side_;
  bool has_bias_;
  std::shared_ptr<Dense> q_, k_, v_, o_;
  torch::nn::Embedding relative_attention_bias_ = nullptr;
};

/// Norm, attention and residual.
class T5LayerAttention : public torch::nn::Cloneable<T5LayerAttention> {
 public:
  enum class Over { self, encoder };
  T5LayerAttention(const T5Config& config, Side side, Over over, bool has_bias)
      : Cloneable(over == Over::self ? "T5LayerSelfAttention" : "T5LayerCrossAttention"),
        config_(config),
        side_(side),
        over_(over),
        has_bias_(has_bias) {
    reset();
  }

  void reset() override {
    attention_ = register_module(over_ == Over::self ? "SelfAttention" : "EncDecAttention",
                                 std::make_shared<T5Attention>(config_, side_, has_bias_));
    layer_norm_ = register_module("layer_norm", config_.norm());
  }

  /// @param see  From the normalised input to keys and values.
  template <class See> Tensor forward(const Tensor& hidden, const AttentionMask& mask, See&& see) {
    const auto normal = layer_norm_->forward(hidden);
    return hidden + torch::dropout(attention_->forward(normal, see(normal), mask), config_.dropout, is_training());
  }
  T5Attention& attention() { return *attention_; }

 private:
  T5Config config_;
  Side side_;
  Over over_;
  bool has_bias_;
  std::shared_ptr<T5Attention> attention_;
  std::shared_ptr<RmsNorm> layer_norm_;
};

class T5Dense : public torch::nn::Cloneable<T5Dense> {
 public:
  explicit T5Dense(const T5Config& config)
      : Cloneable(config.gated ? "T5DenseGatedActDense" : "T5DenseActDense"), config_(config) {
    reset();
  }

  void reset() override {
    if (config_.gated) {
      wi_ = register_module("wi_0", std::make_shared<Dense>(config_.d_model, config_.d_ff, /*with_bias=*/false));
      gate_ = register_module("wi_1", std::make_shared<Dense>(config_.d_model, config_.d_ff, /*with_bias=*/false));
    } else {
      wi_ = register_module("wi", std::make_shared<Dense>(config_.d_model, config_.d_ff, /*with_bias=*/false));
    }
    wo_ = register_module("wo", std::make_shared<Dense>(config_.d_ff, config_.d_model, /*with_bias=*/false));
  }

  Tensor forward(const Tensor& x) {
    auto inner = config_.activation(wi_->forward(x));
    if (gate_) inner = inner * gate_->forward(x);
    return wo_->forward(torch::dropout(inner, config_.dropout, is_training()));
  }

 private:
  T5Config config_;
  std::shared_ptr<Dense> wi_, gate_, wo_;
};

class T5LayerFF : public torch::nn::Cloneable<T5LayerFF> {
 public:
  explicit T5LayerFF(const T5Config& config) : config_(config) { reset(); }

  void reset() override {
    dense_ = register_module("DenseReluDense", std::make_shared<T5Dense>(config_));
    layer_norm_ = register_module("layer_norm", config_.norm());
  }
  Tensor forward(const Tensor& hidden) {
    return hidden + torch::dropout(dense_->forward(layer_norm_->forward(hidden)), config_.dropout, is_training());
  }

 private:
  T5Config config_;
  std::shared_ptr<T5Dense> dense_;
  std::shared_ptr<RmsNorm> layer_norm_;
};

/// The encoder's output as the decoder's layers see it.
struct EncoderOutput {
  std::vector<std::pair<Tensor, Tensor>> layers;  ///< keys and values, [B, H, T, d_kv] each
  Tensor mask;                                    ///< added to the scores, or undefined
};

class T5Block : public torch::nn::Cloneable<T5Block>, public NoSplit {
 public:
  T5Block(const T5Config& config, Side side, int64_t layer) : config_(config), side_(side), index_(layer) { reset(); }

  void reset() override {
    layer_ = register_module("layer", torch::nn::ModuleList());
    layer_->push_back(self_ = std::make_shared<T5LayerAttention>(config_, side_, T5LayerAttention::Over::self,
                                                                 /*has_bias=*/index_ == 0));
    if (side_ == Side::decoder)
      layer_->push_back(cross_ = std::make_shared<T5LayerAttention>(config_, side_, T5LayerAttention::Over::encoder,
                                                                    /*has_bias=*/false));
    layer_->push_back(feed_forward_ = std::make_shared<T5LayerFF>(config_));
  }

  Tensor forward(Tensor hidden, const AttentionMask& mask, KeyValueCache* cache, const EncoderOutput* encoded) {
    hidden = self_->forward(hidden, mask, [&](const Tensor& x) {
      const auto [key, value] = self_->attention().keys_and_values(x);
      return remember(cache, index_, key, value);
    });
    if (encoded)
      hidden =
          cross_->forward(hidden, {.added = encoded->mask}, [&](const Tensor&) { return encoded->layers[index_]; });
    return feed_forward_->forward(hidden);
  }
  T5Attention& self_attention() { return self_->attention(); }
  T5Attention& cross_attention() { return cross_->attention(); }

 private:
  T5Config config_;
  Side side_;
  int64_t index_;
  torch::nn::ModuleList layer_ = nullptr;
  std::shared_ptr<T5LayerAttention> self_, cross_;
  std::shared_ptr<T5LayerFF> feed_forward_;
};

class T5Stack : public torch::nn::Cloneable<T5Stack> {
 public:
  T5Stack(const T5Config& config, Side side) : config_(config), side_(side) { reset(); }

  void reset() override {
    block_ = register_module("block", torch::nn::ModuleList());
    for (int64_t i = 0; i < (side_ == Side::encoder ? config_.layers : config_.decoder_layers); ++i)
      block_->push_back(std::make_shared<T5Block>(config_, side_, i));
    final_layer_norm_ = register_module("final_layer_norm", config_.norm());
  }

  /// @param words  Embedded tokens, [B, T, D].  @param encoded  Of the other stack, for the decoder.
  Tensor forward(const Tensor& words, const Tensor& attention_mask, KeyValueCache* cache,
                 const EncoderOutput* encoded) {
    const int64_t past = past_tokens(cache), tokens = words.size(1);
    auto hidden = torch::dropout(words, config_.dropout, is_training());
    // All layers share the first one's bias.
    const auto mask = with_bias(
        side_ == Side::encoder ? padding_mask(attention_mask, hidden) : causal_mask(attention_mask, hidden, past),
        block(0).self_attention().bias(past, tokens));
    for (int64_t i = 0; i < size(); ++i) hidden = block(i).forward(hidden, mask, cache, encoded);
    return torch::dropout(final_layer_norm_->forward(hidden), config_.dropout, is_training());
  }

  T5Block& block(int64_t index) { return *block_->ptr<T5Block>(index); }
  int64_t size() const { return static_cast<int64_t>(block_->size()); }

 private:
  T5Config config_;
  Side side_;
  torch::nn::ModuleList block_ = nullptr;
  std::shared_ptr<RmsNorm> final_layer_norm_;
};

class T5ForConditionalGeneration : public torch::nn::Cloneable<T5ForConditionalGeneration> {
 public:
  explicit T5ForConditionalGeneration(const T5Config& config) : config_(config) { reset(); }

  void reset() override {
    shared_ = register_module("shared", make_embedding(config_.vocab_size, config_.d_model));
    encoder_ = register_module("encoder", std::make_shared<T5Stack>(config_, Side::encoder));
    decoder_ = register_module("decoder", std::make_shared<T5Stack>(config_, Side::decoder));
    if (!config_.tied)
      lm_head_ =
          register_module("lm_head", std::make_shared<Dense>(config_.d_model, config_.vocab_size, /*with_bias=*/false));
  }

  EncoderOutput encode(const Tensor& input_ids, const Tensor& attention_mask) {
    check_inputs({"T5ForConditionalGeneration (encoder)", input_ids, attention_mask, Tensor(), 0, std::nullopt});
    const auto hidden = encoder_->forward(shared_(input_ids), attention_mask, nullptr, nullptr);
    EncoderOutput encoded{.layers = {}, .mask = padding_mask(attention_mask, hidden).added};
    for (int64_t i = 0; i < decoder_->size(); ++i)
      encoded.layers.push_back(decoder_->block(i).cross_attention().keys_and_values(hidden));
    return encoded;
  }

  Tensor decode(const EncoderOutput& encoded, const Tensor& input_ids, const Tensor& attention_mask,
                KeyValueCache* cache, int64_t logits_to_keep) {
    check_inputs({"T5ForConditionalGeneration (decoder)", input_ids, attention_mask, Tensor(), past_tokens(cache),
                  std::nullopt});
    auto hidden = last_tokens(decoder_->forward(shared_(input_ids), attention_mask, cache, &encoded), logits_to_keep);
    if (config_.scales_output) hidden = hidden * std::pow(static_cast<double>(config_.d_model), -0.5);
    return lm_head_ ? lm_head_->forward(hidden) : project(hidden, shared_->weight);
  }

  /// Fresh weights as T5 was trained from. @param name  Of the parameter.
  void initialize(const std::string& name, const Tensor& parameter) const {
    const torch::NoGradGuard no_grad;
    const auto inverse_root = [](int64_t size) { return 1 / std::sqrt(static_cast<double>(size)); };
    double deviation = inverse_root(config_.d_model);
    if (name.ends_with("layer_norm.weight")) {
      parameter.fill_(config_.factor);
      return;
    }
    // Files of version 1.1 without a head mean the embeddings.
    if (name == "lm_head.weight") {
      parameter.copy_(shared_->weight);
      return;
    }
    if (name == "shared.weight") deviation = 1;
    if (name.ends_with(".q.weight")) deviation = inverse_root(config_.d_model * config_.d_kv);
    if (name.ends_with(".o.weight")) deviation = inverse_root(config_.heads * config_.d_kv);
    if (name.ends_with(".wo.weight")) deviation = inverse_root(config_.d_ff);
    parameter.normal_(0, config_.factor * deviation);
  }

 private:
  T5Config config_;
  torch::nn::Embedding shared_ = nullptr;
  std::shared_ptr<T5Stack> encoder_, decoder_;
  std::shared_ptr<Dense> lm_head_;  ///< Null where the embeddings are the head.
};

/// For batches of the decoder with n rows for each of the encoder's.
EncoderOutput repeated(const EncoderOutput& encoded, int64_t rows) {
  const int64_t own = encoded.layers.front().first.size(0);
  if (rows == own || own == 0 || rows % own != 0) return encoded;
  const auto repeat = [&](const Tensor& x) { return x.defined() ? x.repeat_interleave(rows / own, 0) : x; };
  EncoderOutput result{.layers = {}, .mask = repeat(encoded.mask)};
  for (const auto& [key, value] : encoded.layers) result.layers.emplace_back(repeat(key), repeat(value));
  return result;
}

}  // namespace

Architecture build_t5(const std::filesystem::path& path, const std::string&) {
  JsonFile file(path);
  file.rename({{"hidden_size", "d_model"}, {"num_attention_heads", "num_heads"}, {"head_dim", "d_kv"}});
  refuse_foreign_fields(file);
  const T5Config config{file};
  const auto model = std::make_shared<T5ForConditionalGeneration>(config);
  const auto encode = [model](const Tensor& input_ids, const Tensor& attention_mask) -> AutoModelForCausalLM::Forward {
    // Repeated once for the first batch of beams, then kept.
    const auto encoded = std::make_shared<EncoderOutput>(model->encode(input_ids, attention_mask));
    return [model, encoded](const Tensor& ids, const Tensor& mask, const Tensor&, KeyValueCache* cache,
                            int64_t logits_to_keep) {
      *encoded = repeated(*encoded, ids.size(0));
      return model->decode(*encoded, ids, mask, cache, logits_to_keep);
    };
  };
  return {
      .module = model,
      .rules = {.head_prefixes = {"lm_head."},
                .ignored_suffixes = {"embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight",
                                     "lm_head.weight"},
                .tied_to = config.tied ? "shared.weight" : ""},
      .initialize = [model](const std::string& name, const Tensor& parameter) { model->initialize(name, parameter); },
      .encode = encode};
}

}  // namespace accelerate::models
