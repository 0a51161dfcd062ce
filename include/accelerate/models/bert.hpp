#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include "accelerate/model/hidden_size.hpp"
#include "accelerate/models/pretrained.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/nested.hpp"

/// BERT with Hugging Face's parameter names, so that its folders load and the folders saved here load in Python's
/// transformers. Shapes: B batch, T tokens, D hidden_size, V vocab_size, L number of labels. Source: arXiv:1810.04805;
/// the architecture as transformers has it.
namespace accelerate::models {

namespace detail {
class BertEmbeddings;
class BertEncoder;
class BertPooler;
class Dense;
}  // namespace detail

/// The fields of config.json; defaults are those of bert-base-uncased.
struct ACCELERATE_API BertConfig {
  int64_t vocab_size = 30522;
  int64_t hidden_size = 768;
  int64_t num_hidden_layers = 12;
  int64_t num_attention_heads = 12;
  int64_t intermediate_size = 3072;
  int64_t max_position_embeddings = 512;
  int64_t type_vocab_size = 2;
  std::string hidden_act = "gelu";  ///< gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, relu, silu, swish or tanh.
  double hidden_dropout_prob = 0.1;
  double attention_probs_dropout_prob = 0.1;
  std::optional<double> classifier_dropout;  ///< As hidden_dropout_prob where it is not given.
  double initializer_range = 0.02;           ///< Standard deviation of fresh weights.
  double layer_norm_eps = 1e-12;
  std::optional<int64_t> pad_token_id = 0;  ///< Its embedding gets no gradient.
  std::vector<std::string> labels = {"LABEL_0",
                                     "LABEL_1"};  ///< "id2label"; as many as the classification head has outputs.
  std::optional<std::string> problem_type;  ///< regression, single_label_classification or multi_label_classification;
                                            ///< kept for other programs.
  std::string other_fields =
      "{}";  ///< The JSON that was read, so that saving keeps the fields that are not listed here.

  int64_t num_labels() const { return static_cast<int64_t>(labels.size()); }
  /// Gives the head this many outputs; existing names are kept where the number does not change.
  void set_num_labels(int64_t count);

  /// @throws ConfigError naming the first field that is out of range or not supported, with its value.
  void validate() const;
  /// Reads `config.json` of a folder, or such a file. @throws CheckpointError if it is missing, malformed, of another
  /// model type or not valid.
  static BertConfig from_pretrained(const std::filesystem::path& folder);
};

struct BertOutput {
  torch::Tensor last_hidden_state;  ///< [B, T, D]
  torch::Tensor pooler_output;      ///< [B, D]; undefined without a pooler.
  ACCELERATE_FIELDS(last_hidden_state, pooler_output)
};

struct BertModelOptions {
  bool add_pooling_layer = true;
};

struct BertLoadOptions {
  std::optional<int64_t> num_labels;  ///< Outputs of the classification head; as the folder says where it is not given.
  bool add_pooling_layer = true;      ///< Of BertModel; the classifier always has one.
  /// Initialise parameters of another shape freshly and report them, instead of the error.
  bool ignore_mismatched_sizes = false;
};

class ACCELERATE_API BertModelImpl : public torch::nn::Cloneable<BertModelImpl>, public HasHiddenSize {
 public:
  /// @throws ConfigError as BertConfig::validate.
  explicit BertModelImpl(const BertConfig& config, const BertModelOptions& options = {},
                         Weights weights = Weights::fresh);
  void reset() override;

  /// @param input_ids       [B, T] int64
  /// @param attention_mask  [B, T], 0 for padding, of any dtype; no padding where it is undefined.
  /// @param token_type_ids  [B, T] int64; all 0 where it is undefined.
  /// @throws ShapeError if shapes differ or T exceeds max_position_embeddings.
  BertOutput forward(const torch::Tensor& input_ids, const torch::Tensor& attention_mask = {},
                     const torch::Tensor& token_type_ids = {});

  const BertConfig& config() const { return config_; }
  int64_t hidden_size() const override { return config_.hidden_size; }
  /// Writes config.json and model.safetensors; creates the folder. @throws CheckpointError, ResourceError
  void save_pretrained(const std::filesystem::path& folder) const;
  /// The same of these weights, by the model's own names: what Accelerator::get_state_dict() gives rank 0 of a model
  /// that is sharded, whose own are elsewhere. @throws CheckpointError where one is missing, has another shape or
  /// belongs to another model
  void save_pretrained(const std::filesystem::path& folder, const std::map<std::string, at::Tensor>& weights) const;

 private:
  BertConfig config_;
  BertModelOptions options_;
  std::shared_ptr<detail::BertEmbeddings> embeddings_;
  std::shared_ptr<detail::BertEncoder> encoder_;
  std::shared_ptr<detail::BertPooler> pooler_;
};

/// Handle of a BertModelImpl, as torch::nn's modules have.
class ACCELERATE_API BertModel : public torch::nn::ModuleHolder<BertModelImpl> {
 public:
  using Impl = BertModelImpl;
  using torch::nn::ModuleHolder<BertModelImpl>::ModuleHolder;
  /// Loads a Hugging Face folder (config.json and safetensors, one file or shards), saved with or without a head.
  /// @param report  Receives what was missing and what was left over.
  /// @throws CheckpointError if a file is missing or damaged, a shape differs (all of them are listed), or anything but
  /// the pooler is missing.
  static BertModel from_pretrained(const std::filesystem::path& folder, const BertLoadOptions& options = {},
                                   LoadReport* report = nullptr);
};

class ACCELERATE_API BertForSequenceClassificationImpl
    : public torch::nn::Cloneable<BertForSequenceClassificationImpl> {
 public:
  /// @throws ConfigError as BertConfig::validate.
  explicit BertForSequenceClassificationImpl(const BertConfig& config, Weights weights = Weights::fresh);
  void reset() override;

  /// @return logits [B, L]; parameters as BertModelImpl::forward.
  torch::Tensor forward(const torch::Tensor& input_ids, const torch::Tensor& attention_mask = {},
                        const torch::Tensor& token_type_ids = {});

  const BertConfig& config() const { return config_; }
  /// As BertModelImpl::save_pretrained.
  void save_pretrained(const std::filesystem::path& folder) const;
  void save_pretrained(const std::filesystem::path& folder, const std::map<std::string, at::Tensor>& weights) const;

 private:
  BertConfig config_;
  BertModel bert_ = nullptr;
  std::shared_ptr<detail::Dense> classifier_;
};

/// Handle of a BertForSequenceClassificationImpl.
class ACCELERATE_API BertForSequenceClassification : public torch::nn::ModuleHolder<BertForSequenceClassificationImpl> {
 public:
  using Impl = BertForSequenceClassificationImpl;
  using torch::nn::ModuleHolder<BertForSequenceClassificationImpl>::ModuleHolder;
  /// As BertModel::from_pretrained; a missing pooler or classifier is initialised freshly and reported.
  static BertForSequenceClassification from_pretrained(const std::filesystem::path& folder,
                                                       const BertLoadOptions& options = {},
                                                       LoadReport* report = nullptr);
};

}  // namespace accelerate::models
