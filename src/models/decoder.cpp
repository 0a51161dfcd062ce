#include "models/decoder.hpp"

#include <torch/torch.h>

#include "models/attention.hpp"
#include "models/token_inputs.hpp"

namespace accelerate::models::detail {

using torch::Tensor;

namespace {

class DecoderAttention : public torch::nn::Cloneable<DecoderAttention> {
 public:
  DecoderAttention(SharedForm form, int64_t layer)
      : Cloneable(form->family + "Attention"), form_(std::move(form)), layer_(layer) {
    reset();
  }

  void reset() override {
    const auto& form = *form_;
    const int64_t outputs = form.projections == Projections::separate ? form.hidden_size : 3 * form.hidden_size;
    layers_.clear();
    for (const auto* name : form.attention)
      layers_.push_back(register_module(
          name, std::make_shared<Dense>(form.hidden_size, name == form.attention.back() ? form.hidden_size : outputs,
                                        form.attention_bias, form.transposed)));
  }

  Tensor forward(const Tensor& hidden, const DecoderContext& context) {
    const auto& form = *form_;
    const auto heads = [&](const Tensor& x) { return split_heads(x, form.head_size()); };
    const auto turned = [&](const Tensor& x) { return context.rotary ? context.rotary->rotate(x) : x; };
    Tensor query, key, value;
    if (form.projections == Projections::separate) {
      if (form.queries_first) query = heads(layers_[2]->forward(hidden));
      value = heads(layers_[1]->forward(hidden));
      key = heads(layers_[0]->forward(hidden));
      if (!form.queries_first) query = heads(layers_[2]->forward(hidden));
    } else if (form.projections == Projections::per_head) {
      const auto parts = split_heads(layers_[0]->forward(hidden), 3 * form.head_size()).chunk(3, -1);
      query = parts[0], key = parts[1], value = parts[2];
    } else {
      const auto parts = layers_[0]->forward(hidden).chunk(3, -1);
      query = heads(parts[0]), key = heads(parts[1]), value = heads(parts[2]);
    }
    auto scale = form.score_scale;
    if (form.divides_scores_by_layer) *scale /= static_cast<double>(layer_ + 1);
    const auto [keys, values] = remember(context.cache, layer_, turned(key), value);
    return layers_.back()->forward(attend(turned(query), keys, values, context.mask,
                                          {.scale = scale, .dropout = is_training() ? form.attention_dropout : 0.0}));
  }

 private:
  SharedForm form_;
  int64_t layer_;
  std::vector<std::shared_ptr<Dense>> layers_;  ///< as DecoderForm::attention
};

std::shared_ptr<Dense> first_layer(const DecoderForm& form) {
  return std::make_shared<Dense>(form.hidden_size, form.inner_size, form.mlp_bias, form.transposed);
}
std::shared_ptr<Dense> second_layer(const DecoderForm& form) {
  return std::make_shared<Dense>(form.inner_size, form.hidden_size, form.mlp_bias, form.transposed);
}

class DecoderMLP : public torch::nn::Cloneable<DecoderMLP> {
 public:
  explicit DecoderMLP(SharedForm form) : Cloneable(form->family + "MLP"), form_(std::move(form)) { reset(); }

  void reset() override {
    first_ = register_module(form_->mlp[0], first_layer(*form_));
    second_ = register_module(form_->mlp[1], second_layer(*form_));
  }
  Tensor forward(const Tensor& hidden) { return second_->forward(form_->activation(first_->forward(hidden))); }

 private:
  SharedForm form_;
  std::shared_ptr<Dense> first_, second_;
};

class DecoderBlock : public torch::nn::Cloneable<DecoderBlock>, public NoSplit {
 public:
  DecoderBlock(SharedForm form, int64_t layer)
      : Cloneable(form->family + form->block_class), form_(std::move(form)), layer_(layer) {
    reset();
  }

  void reset() override {
    for (const auto& [part, name] : form_->block) switch (part) {
        case BlockPart::attention:
          attention_ = register_module(name, std::make_shared<DecoderAttention>(form_, layer_));
          break;
        case BlockPart::attention_norm:
          attention_norm_ = register_module(name, form_->norm());
          break;
        case BlockPart::mlp:
          mlp_ = register_module(name, std::make_shared<DecoderMLP>(form_));
          break;
        case BlockPart::mlp_first:
          mlp_first_ = register_module(name, first_layer(*form_));
          break;
        case BlockPart::mlp_second:
          mlp_second_ = register_module(name, second_layer(*form_));
          break;
        case BlockPart::mlp_norm:
          mlp_norm_ = register_module(name, form_->norm());
          break;
      }
  }

  Tensor forward(const Tensor& hidden, const DecoderContext& context) {
    const auto& form = *form_;
    if (is_training() && form.layer_dropout > 0 && torch::rand({}).item<double>() < form.layer_dropout) return hidden;
    const auto dropped = [&](const Tensor& x) { return torch::dropout(x, form.residual_dropout, is_training()); };
    const auto attention = [&](const Tensor& x) { return dropped(attention_->forward(x, context)); };
    const auto mlp = [&](const Tensor& x) {
      return dropped(mlp_ ? mlp_->forward(x) : mlp_second_->forward(form.activation(mlp_first_->forward(x))));
    };
    if (form.form == BlockForm::norms_behind) {
      const auto attended = attention_norm_(hidden + attention(hidden));
      return mlp_norm_(attended + mlp(attended));
    }
    if (form.form == BlockForm::one_norm) {
      const auto normal = attention_norm_(hidden), inner = mlp(normal);  // draws for its dropout first
      return attention(normal) + inner + hidden;
    }
    const auto attended = hidden + attention(attention_norm_(hidden));
    return attended + mlp(mlp_norm_(form.form == BlockForm::side_by_side ? hidden : attended));
  }

 private:
  SharedForm form_;
  int64_t layer_;
  torch::nn::LayerNorm attention_norm_ = nullptr, mlp_norm_ = nullptr;
  std::shared_ptr<DecoderAttention> attention_;
  std::shared_ptr<DecoderMLP> mlp_;  ///< Or the two layers are the block's own.
  std::shared_ptr<Dense> mlp_first_, mlp_second_;
};

}  // namespace

torch::nn::ModuleList make_blocks(const SharedForm& form) {
  torch::nn::ModuleList blocks;
  for (int64_t i = 0; i < form->layers; ++i) blocks->push_back(std::make_shared<DecoderBlock>(form, i));
  return blocks;
}

Tensor run_blocks(const torch::nn::ModuleList& blocks, Tensor hidden, const DecoderContext& context) {
  for (const auto& block : *blocks) hidden = block->as<DecoderBlock>()->forward(hidden, context);
  return hidden;
}

namespace {

/// Embeddings, blocks, and the last norm.
class GptDecoder : public torch::nn::Cloneable<GptDecoder> {
 public:
  explicit GptDecoder(SharedForm form)
      : Cloneable(form->family + (form->decoder ? "Decoder" : "Model")), form_(std::move(form)) {
    reset();
  }

  void reset() override {
    const auto& form = *form_;
    const int64_t words = form.size_of_words();
    words_ = register_module(form.words, make_embedding(form.vocab_size, words));
    if (form.learned.name)
      positions_ = register_module(form.learned.name,
                                   make_embedding(form.learned.count + form.learned.first_row, form.hidden_size));
    if (words != form.hidden_size) {
      project_out_ =
          register_module("project_out", std::make_shared<Dense>(form.hidden_size, words, /*with_bias=*/false));
      project_in_ =
          register_module("project_in", std::make_shared<Dense>(words, form.hidden_size, /*with_bias=*/false));
    }
    const auto add_norm = [&] {
      if (form.final_norm) norm_ = register_module(form.last_norm, form.norm());
    };
    if (form.final_norm_before_layers) add_norm();
    blocks_ = register_module(form.blocks, make_blocks(form_));
    if (!form.final_norm_before_layers) add_norm();
  }

  Tensor forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                 KeyValueCache* cache) {
    const auto& form = *form_;
    const int64_t past = past_tokens(cache);
    check_inputs({form.family + "Model", input_ids, attention_mask, position_ids, past, form.most_positions});
    Tensor hidden = words_(input_ids);
    if (project_in_) hidden = project_in_->forward(hidden);
    if (form.learned.name) hidden = hidden + positions_(rows_of_positions(attention_mask, position_ids, past, hidden));
    hidden = torch::dropout(hidden, form.embedding_dropout, is_training());
    const DecoderContext context{
        .rotary = form.rotary ? std::optional(form.rotary(position_ids, past, hidden)) : std::nullopt,
        .mask = causal_mask(attention_mask, hidden, past),
        .cache = cache};
    hidden = run_blocks(blocks_, std::move(hidden), context);
    if (form.final_norm) hidden = norm_(hidden);
    return project_out_ ? project_out_->forward(hidden) : hidden;
  }

  const Tensor& words() const { return words_->weight; }

 private:
  Tensor rows_of_positions(const Tensor& attention_mask, const Tensor& position_ids, int64_t past,
                           const Tensor& hidden) const {
    const int64_t tokens = hidden.size(1);
    Tensor positions = position_ids;
    if (!positions.defined() && !form_->learned.count_padding && attention_mask.defined()) {
      const auto seen = attention_mask.ne(0).to(at::kLong);
      positions = (seen.cumsum(1) * seen - 1).narrow(1, past, tokens);
    }
    if (!positions.defined()) positions = positions_from(past, tokens, hidden.device());
    return form_->learned.first_row > 0 ? positions + form_->learned.first_row : positions;
  }

  SharedForm form_;
  torch::nn::Embedding words_ = nullptr, positions_ = nullptr;
  std::shared_ptr<Dense> project_out_, project_in_;
  torch::nn::ModuleList blocks_ = nullptr;
  torch::nn::LayerNorm norm_ = nullptr;
};

/// The modules around a decoder in an architecture that has encoders elsewhere.
class AroundDecoder : public torch::nn::Cloneable<AroundDecoder> {
 public:
  explicit AroundDecoder(SharedForm form) : Cloneable(form->family + "Model"), form_(std::move(form)) { reset(); }
  void reset() override { decoder_ = register_module(form_->decoder, std::make_shared<GptDecoder>(form_)); }
  GptDecoder& decoder() { return *decoder_; }

 private:
  SharedForm form_;
  std::shared_ptr<GptDecoder> decoder_;
};

/// The bias of a head whose weights are the embeddings.
class HeadBias : public torch::nn::Cloneable<HeadBias> {
 public:
  explicit HeadBias(const DecoderForm& form) : Cloneable(form.family + "HeadBias"), size_(form.vocab_size) { reset(); }
  void reset() override { bias = register_parameter("bias", torch::empty({size_})); }
  Tensor bias;

 private:
  int64_t size_;
};

class CausalDecoder : public torch::nn::Cloneable<CausalDecoder> {
 public:
  explicit CausalDecoder(SharedForm form) : Cloneable(form->family + "ForCausalLM"), form_(std::move(form)) { reset(); }

  void reset() override {
    const auto& form = *form_;
    if (form.decoder) around_ = register_module(form.model, std::make_shared<AroundDecoder>(form_));
    else decoder_ = register_module(form.model, std::make_shared<GptDecoder>(form_));
    if (!form.tied)
      head_ =
          register_module(form.head, std::make_shared<Dense>(form.size_of_words(), form.vocab_size, form.head_bias));
    else if (form.head_bias) tied_head_ = register_module(form.head, std::make_shared<HeadBias>(form));
  }

  Tensor forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& position_ids,
                 KeyValueCache* cache, int64_t logits_to_keep) {
    auto& decoder = around_ ? around_->decoder() : *decoder_;
    const auto hidden = last_tokens(decoder.forward(input_ids, attention_mask, position_ids, cache), logits_to_keep);
    return head_ ? head_->forward(hidden) : project(hidden, decoder.words(), tied_head_ ? tied_head_->bias : Tensor());
  }

 private:
  SharedForm form_;
  std::shared_ptr<GptDecoder> decoder_;  ///< One of these two.
  std::shared_ptr<AroundDecoder> around_;
  std::shared_ptr<Dense> head_;  ///< Null where the embeddings are the head.
  std::shared_ptr<HeadBias> tied_head_;
};

}  // namespace

Architecture causal_decoder(DecoderForm form, std::vector<std::string> ignored_suffixes, double deviation,
                            int64_t max_positions) {
  WeightRules rules{.names = formats::weight_names_of_type(form.model_type),
                    .head_prefixes = {std::string(form.head) + "."},
                    .ignored_suffixes = std::move(ignored_suffixes)};
  if (form.tied)
    rules.tie(form.head, fmt::format("{}.{}{}.weight", form.model, form.decoder ? fmt::format("{}.", form.decoder) : "",
                                     form.words));
  const auto model = std::make_shared<CausalDecoder>(std::make_shared<const DecoderForm>(std::move(form)));
  return {.module = model,
          .rules = std::move(rules),
          .initialize = initialize_normal(deviation),
          .causal = causal_forward(model),
          .max_positions = max_positions};
}

}  // namespace accelerate::models::detail
