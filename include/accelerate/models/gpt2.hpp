#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include "accelerate/model/hidden_size.hpp"
#include "accelerate/models/key_value_cache.hpp"
#include "accelerate/models/pretrained.hpp"
#include "accelerate/utils/export.hpp"

/// GPT-2 with Hugging Face's parameter names, so that its folders load and the folders saved here load in Python's
/// transformers. Shapes: B batch, T new tokens, S tokens in a cache, D n_embd, V vocab_size. Source: Radford et al.,
/// "Language Models are Unsupervised Multitask Learners"; the architecture as transformers has it.
namespace accelerate::models {

/// The fields of config.json; defaults are transformers', those of the smallest GPT-2.
struct ACCELERATE_API GPT2Config {
  int64_t vocab_size = 50257;
  int64_t n_positions = 1024;
  int64_t n_embd = 768;
  int64_t n_layer = 12;
  int64_t n_head = 12;
  std::optional<int64_t> n_inner;                ///< 4 * n_embd where it is not given.
  std::string activation_function = "gelu_new";  ///< As BertConfig::hidden_act.
  double resid_pdrop = 0.1;
  double embd_pdrop = 0.1;
  double attn_pdrop = 0.1;
  double layer_norm_epsilon = 1e-5;
  /// Standard deviation of fresh weights; what ends a residual branch gets 1 / sqrt(2 n_layer) of it.
  double initializer_range = 0.02;
  bool scale_attn_weights = true;                ///< Scores by 1 / sqrt(head size).
  bool scale_attn_by_inverse_layer_idx = false;  ///< And by 1 / (number of the layer).
  bool tie_word_embeddings = true;               ///< The head multiplies by the embeddings.
  std::string other_fields =
      "{}";  ///< The JSON that was read, so that saving keeps the fields that are not listed here.

  int64_t inner_size() const { return n_inner.value_or(4 * n_embd); }
  /// @throws ConfigError naming the first field that is out of range or not supported, with its value.
  void validate() const;
  /// Reads `config.json` of a folder, or such a file, or the metadata of a .gguf file. @throws CheckpointError if it is
  /// missing, malformed, of another model type or not valid.
  static GPT2Config from_pretrained(const std::filesystem::path& folder);
};

namespace detail {
class Dense;
}

/// Its layers are of class GPT2Block: the unit of sharding (transformer_cls_names_to_wrap).
class ACCELERATE_API GPT2ModelImpl : public torch::nn::Cloneable<GPT2ModelImpl>, public HasHiddenSize {
 public:
  /// @throws ConfigError as GPT2Config::validate.
  explicit GPT2ModelImpl(const GPT2Config& config, Weights weights = Weights::fresh);
  void reset() override;

  /// @param input_ids       [B, T] int64
  /// @param attention_mask  [B, S + T], 0 for padding, of any dtype; no padding where it is undefined
  /// @param position_ids    [B, T] or [1, T] int64; S, S + 1, … where it is undefined
  /// @param cache           Holds the S tokens before these, and these too afterwards; S is 0 where it is null.
  /// @return the last hidden states [B, T, D]
  /// @throws ShapeError if shapes differ or S + T exceeds n_positions.
  torch::Tensor forward(const torch::Tensor& input_ids, const torch::Tensor& attention_mask = {},
                        const torch::Tensor& position_ids = {}, KeyValueCache* cache = nullptr);

  const GPT2Config& config() const { return config_; }
  int64_t hidden_size() const override { return config_.n_embd; }
  const torch::nn::Embedding& wte() const { return wte_; }
  /// Writes config.json and model.safetensors; creates the folder. @throws CheckpointError, ResourceError
  void save_pretrained(const std::filesystem::path& folder) const;
  /// The same of these weights, by the model's own names: what Accelerator::get_state_dict() gives rank 0 of a model
  /// that is sharded, whose own are elsewhere. @throws CheckpointError where one is missing, has another shape or
  /// belongs to another model
  void save_pretrained(const std::filesystem::path& folder, const std::map<std::string, at::Tensor>& weights) const;

 private:
  GPT2Config config_;
  torch::nn::Embedding wte_ = nullptr, wpe_ = nullptr;
  torch::nn::ModuleList h_ = nullptr;
  torch::nn::LayerNorm ln_f_ = nullptr;
};

/// Handle of a GPT2ModelImpl, as torch::nn's modules have.
class ACCELERATE_API GPT2Model : public torch::nn::ModuleHolder<GPT2ModelImpl> {
 public:
  using Impl = GPT2ModelImpl;
  using torch::nn::ModuleHolder<GPT2ModelImpl>::ModuleHolder;
  /// Loads a Hugging Face folder (config.json and safetensors, one file or shards), saved with or without a head; or a
  /// .gguf file, decoded.
  /// @param report  Receives what was missing and what was left over.
  /// @throws CheckpointError if a file is missing or damaged, a shape differs (all of them are listed), or a parameter
  /// is missing.
  static GPT2Model from_pretrained(const std::filesystem::path& folder, LoadReport* report = nullptr);
};

class ACCELERATE_API GPT2LMHeadModelImpl : public torch::nn::Cloneable<GPT2LMHeadModelImpl> {
 public:
  /// @throws ConfigError as GPT2Config::validate.
  explicit GPT2LMHeadModelImpl(const GPT2Config& config, Weights weights = Weights::fresh);
  void reset() override;

  /// @param logits_to_keep  Logits of so many tokens, the last ones; 0: of all.
  /// @return logits [B, T or logits_to_keep, V]; the other parameters as GPT2ModelImpl::forward.
  torch::Tensor forward(const torch::Tensor& input_ids, const torch::Tensor& attention_mask = {},
                        const torch::Tensor& position_ids = {}, KeyValueCache* cache = nullptr,
                        int64_t logits_to_keep = 0);

  const GPT2Config& config() const { return config_; }
  /// For generate(), which refuses more tokens.
  std::optional<int64_t> max_positions() const { return config_.n_positions; }
  /// As GPT2ModelImpl::save_pretrained.
  void save_pretrained(const std::filesystem::path& folder) const;
  void save_pretrained(const std::filesystem::path& folder, const std::map<std::string, at::Tensor>& weights) const;

 private:
  GPT2Config config_;
  GPT2Model transformer_ = nullptr;
  std::shared_ptr<detail::Dense> lm_head_;  ///< Null where the embeddings are the head.
};

/// Handle of a GPT2LMHeadModelImpl.
class ACCELERATE_API GPT2LMHeadModel : public torch::nn::ModuleHolder<GPT2LMHeadModelImpl> {
 public:
  using Impl = GPT2LMHeadModelImpl;
  using torch::nn::ModuleHolder<GPT2LMHeadModelImpl>::ModuleHolder;
  /// As GPT2Model::from_pretrained; a missing head is initialised freshly and reported.
  static GPT2LMHeadModel from_pretrained(const std::filesystem::path& folder, LoadReport* report = nullptr);
};

}  // namespace accelerate::models
