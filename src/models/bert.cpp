#include "accelerate/models/bert.hpp"

#include <torch/torch.h>

#include "models/activations.hpp"
#include "models/architecture.hpp"
#include "models/attention.hpp"
#include "models/bert_config.hpp"
#include "models/check_field.hpp"
#include "models/layers.hpp"
#include "utils/raise.hpp"

// Registered names are Hugging Face's; they make the parameter names of the files.

namespace accelerate::models {
namespace detail {

using torch::Tensor;

/// Sum of word, segment and position embeddings. [B, T] -> [B, T, D]
class BertEmbeddings : public torch::nn::Cloneable<BertEmbeddings>, public NoSplit {
 public:
  explicit BertEmbeddings(const BertConfig& config) : config_(config) { reset(); }

  void reset() override {
    word_embeddings_ = register_module("word_embeddings",
                                       make_embedding(config_.vocab_size, config_.hidden_size, config_.pad_token_id));
    position_embeddings_ =
        register_module("position_embeddings", make_embedding(config_.max_position_embeddings, config_.hidden_size));
    token_type_embeddings_ =
        register_module("token_type_embeddings", make_embedding(config_.type_vocab_size, config_.hidden_size));
    layer_norm_ = register_module("LayerNorm", make_layer_norm(config_.hidden_size, config_.layer_norm_eps));
  }

  Tensor forward(const Tensor& input_ids, const Tensor& token_type_ids) {
    const auto positions = torch::arange(input_ids.size(1), input_ids.options());
    const auto types = token_type_ids.defined() ? token_type_ids : torch::zeros_like(input_ids);
    const auto sum = word_embeddings_(input_ids) + token_type_embeddings_(types) + position_embeddings_(positions);
    return torch::dropout(layer_norm_(sum), config_.hidden_dropout_prob, is_training());
  }

 private:
  BertConfig config_;
  torch::nn::Embedding word_embeddings_ = nullptr, position_embeddings_ = nullptr, token_type_embeddings_ = nullptr;
  torch::nn::LayerNorm layer_norm_ = nullptr;
};

class BertSelfAttention : public torch::nn::Cloneable<BertSelfAttention> {
 public:
  explicit BertSelfAttention(const BertConfig& config) : config_(config) { reset(); }

  void reset() override {
    query_ = register_module("query", std::make_shared<Dense>(config_.hidden_size, config_.hidden_size));
    key_ = register_module("key", std::make_shared<Dense>(config_.hidden_size, config_.hidden_size));
    value_ = register_module("value", std::make_shared<Dense>(config_.hidden_size, config_.hidden_size));
  }

  Tensor forward(const Tensor& hidden, const AttentionMask& mask) {
    const auto heads = [&](const Tensor& x) {
      return split_heads(x, config_.hidden_size / config_.num_attention_heads);
    };
    return attend(heads(query_->forward(hidden)), heads(key_->forward(hidden)), heads(value_->forward(hidden)), mask,
                  {.dropout = is_training() ? config_.attention_probs_dropout_prob : 0.0});
  }

 private:
  BertConfig config_;
  std::shared_ptr<Dense> query_, key_, value_;
};

/// Projects back to D, adds the residual and normalises: the end of both halves of a layer.
class BertResidual : public torch::nn::Cloneable<BertResidual> {
 public:
  BertResidual(const BertConfig& config, int64_t input_size) : config_(config), input_size_(input_size) { reset(); }

  void reset() override {
    dense_ = register_module("dense", std::make_shared<Dense>(input_size_, config_.hidden_size));
    layer_norm_ = register_module("LayerNorm", make_layer_norm(config_.hidden_size, config_.layer_norm_eps));
  }

  Tensor forward(const Tensor& x, const Tensor& residual) {
    return layer_norm_(torch::dropout(dense_->forward(x), config_.hidden_dropout_prob, is_training()) + residual);
  }

 private:
  BertConfig config_;
  int64_t input_size_;
  std::shared_ptr<Dense> dense_;
  torch::nn::LayerNorm layer_norm_ = nullptr;
};

class BertAttention : public torch::nn::Cloneable<BertAttention> {
 public:
  explicit BertAttention(const BertConfig& config) : config_(config) { reset(); }

  void reset() override {
    self_ = register_module("self", std::make_shared<BertSelfAttention>(config_));
    output_ = register_module("output", std::make_shared<BertResidual>(config_, config_.hidden_size));
  }

  Tensor forward(const Tensor& hidden, const AttentionMask& mask) {
    return output_->forward(self_->forward(hidden, mask), hidden);
  }

 private:
  BertConfig config_;
  std::shared_ptr<BertSelfAttention> self_;
  std::shared_ptr<BertResidual> output_;
};

class BertIntermediate : public torch::nn::Cloneable<BertIntermediate> {
 public:
  explicit BertIntermediate(const BertConfig& config)
      : config_(config), activation_(find_activation(config.hidden_act).value()) {
    reset();
  }

  void reset() override {
    dense_ = register_module("dense", std::make_shared<Dense>(config_.hidden_size, config_.intermediate_size));
  }
  Tensor forward(const Tensor& hidden) { return activation_(dense_->forward(hidden)); }

 private:
  BertConfig config_;
  Activation activation_;
  std::shared_ptr<Dense> dense_;
};

class BertLayer : public torch::nn::Cloneable<BertLayer>, public NoSplit {
 public:
  explicit BertLayer(const BertConfig& config) : config_(config) { reset(); }

  void reset() override {
    attention_ = register_module("attention", std::make_shared<BertAttention>(config_));
    intermediate_ = register_module("intermediate", std::make_shared<BertIntermediate>(config_));
    output_ = register_module("output", std::make_shared<BertResidual>(config_, config_.intermediate_size));
  }

  Tensor forward(const Tensor& hidden, const AttentionMask& mask) {
    const auto attended = attention_->forward(hidden, mask);
    return output_->forward(intermediate_->forward(attended), attended);
  }

 private:
  BertConfig config_;
  std::shared_ptr<BertAttention> attention_;
  std::shared_ptr<BertIntermediate> intermediate_;
  std::shared_ptr<BertResidual> output_;
};

class BertEncoder : public torch::nn::Cloneable<BertEncoder> {
 public:
  explicit BertEncoder(const BertConfig& config) : config_(config) { reset(); }

  void reset() override {
    layer_ = register_module("layer", torch::nn::ModuleList());
    for (int64_t i = 0; i < config_.num_hidden_layers; ++i) layer_->push_back(std::make_shared<BertLayer>(config_));
  }

  Tensor forward(Tensor hidden, const AttentionMask& mask) {
    for (const auto& layer : *layer_) hidden = layer->as<BertLayer>()->forward(hidden, mask);
    return hidden;
  }

 private:
  BertConfig config_;
  torch::nn::ModuleList layer_ = nullptr;
};

/// [B, T, D] -> [B, D], from the first token.
class BertPooler : public torch::nn::Cloneable<BertPooler> {
 public:
  explicit BertPooler(const BertConfig& config) : config_(config) { reset(); }

  void reset() override {
    dense_ = register_module("dense", std::make_shared<Dense>(config_.hidden_size, config_.hidden_size));
  }
  Tensor forward(const Tensor& hidden) { return torch::tanh(dense_->forward(hidden.select(1, 0))); }

 private:
  BertConfig config_;
  std::shared_ptr<Dense> dense_;
};

}  // namespace detail

namespace {

using torch::Tensor;

void require_same_shape(const Tensor& input_ids, const Tensor& other, const char* name) {
  if (other.defined() && other.sizes() != input_ids.sizes())
    raise<ShapeError>("BertModel::forward: {} has shape {}, but input_ids {}. All inputs are [B, T].", name,
                      other.sizes(), input_ids.sizes());
}

}  // namespace

void initialize(const std::string& name, const Tensor& parameter, const BertConfig& config) {
  const torch::NoGradGuard no_grad;
  if (name.ends_with("bias")) {
    parameter.zero_();
  } else if (name.ends_with("LayerNorm.weight")) {
    parameter.fill_(1);
  } else {
    parameter.normal_(0, config.initializer_range);
    if (name.ends_with("word_embeddings.weight") && config.pad_token_id) parameter[*config.pad_token_id].zero_();
  }
}

BertModelImpl::BertModelImpl(const BertConfig& config, const BertModelOptions& options, Weights weights)
    : config_(valid(config)), options_(options) {
  reset();
  if (weights == Weights::fresh) initialize_all(*this, config_);
}

void BertModelImpl::reset() {
  embeddings_ = register_module("embeddings", std::make_shared<detail::BertEmbeddings>(config_));
  encoder_ = register_module("encoder", std::make_shared<detail::BertEncoder>(config_));
  if (options_.add_pooling_layer) pooler_ = register_module("pooler", std::make_shared<detail::BertPooler>(config_));
}

BertOutput BertModelImpl::forward(const Tensor& input_ids, const Tensor& attention_mask, const Tensor& token_type_ids) {
  if (input_ids.dim() != 2 || (input_ids.scalar_type() != at::kLong && input_ids.scalar_type() != at::kInt))
    raise<ShapeError>("BertModel::forward: input_ids has shape {} and dtype {}, expected [B, T] of int64.",
                      input_ids.sizes(), c10::toString(input_ids.scalar_type()));
  if (input_ids.size(1) > config_.max_position_embeddings)
    raise<ShapeError>(
        "BertModel::forward: input_ids has {} tokens a row, but the model has positions for {}. Truncate when "
        "tokenizing.",
        input_ids.size(1), config_.max_position_embeddings);
  require_same_shape(input_ids, attention_mask, "attention_mask");
  require_same_shape(input_ids, token_type_ids, "token_type_ids");
  auto hidden = embeddings_->forward(input_ids, token_type_ids);
  hidden = encoder_->forward(hidden, padding_mask(attention_mask, hidden));
  return {hidden, pooler_ ? pooler_->forward(hidden) : Tensor()};
}

BertForSequenceClassificationImpl::BertForSequenceClassificationImpl(const BertConfig& config, Weights weights)
    : config_(valid(config)) {
  reset();
  if (weights == Weights::fresh) initialize_all(*this, config_);
}

void BertForSequenceClassificationImpl::reset() {
  bert_ = register_module("bert", BertModel(config_, BertModelOptions{}, Weights::uninitialized));
  classifier_ =
      register_module("classifier", std::make_shared<detail::Dense>(config_.hidden_size, config_.num_labels()));
}

Tensor BertForSequenceClassificationImpl::forward(const Tensor& input_ids, const Tensor& attention_mask,
                                                  const Tensor& token_type_ids) {
  const auto pooled = bert_->forward(input_ids, attention_mask, token_type_ids).pooler_output;
  return classifier_->forward(
      torch::dropout(pooled, config_.classifier_dropout.value_or(config_.hidden_dropout_prob), is_training()));
}

}  // namespace accelerate::models
