#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>

#include <ATen/core/Tensor.h>

#include "accelerate/bigmodel/device_map.hpp"
#include "accelerate/bigmodel/dispatch.hpp"
#include "accelerate/bigmodel/quantize.hpp"
#include "accelerate/models/key_value_cache.hpp"
#include "accelerate/models/pretrained.hpp"
#include "accelerate/utils/export.hpp"

namespace torch::nn {
class Module;
}

/// Models by what config.json says: `architectures` names the class (else `model_type` does), and its parameters have
/// the names of Hugging Face's folders. Known are
///   causal language models   LLaMA, Mistral, Qwen2, Mixtral, GPT-2, GPT-J, GPT-NeoX, OPT
///   encoder and decoder      T5
///   encoders                 BERT (BertModel, BertForSequenceClassification)
///   images                   ViT, ResNet, EfficientNet-lite (by timm's names: "architecture": "tf_efficientnet_lite0",
///   …)
/// Which fields of config.json are understood, and which are refused: docs/models.md.
/// Within init_empty_weights() all of them are built without memory. The classes of their layers are Hugging Face's
/// too: LlamaDecoderLayer, GPTJBlock, …, for wrap policies and device maps. Shapes: B batch, T new tokens, S tokens in
/// a cache, V vocabulary.
///
/// AutoModelForCausalLM and AutoModel are models as any other: prepare(), dispatch_model() and their kin take them, and
/// what these return is called as they are.
namespace accelerate::models {

/// With none of them but dtype, the weights are the model's own, in host memory, and can be trained. Otherwise, and of
/// a folder whose config.json has a quantization_config (`accelerate quantize` writes such folders, and so does
/// transformers), they are loaded by load_checkpoint_and_dispatch() or load_and_quantize_model(): each lies where the
/// map has it, forward() takes its inputs to where the model computes and brings results back, and all weights must be
/// there.
struct AutoLoadOptions {
  /// Of the floating-point parameters; the files' are converted. "auto": what config.json says (`dtype`,
  /// `torch_dtype`), else that of the first floating-point tensor of the files; fp32 of a .gguf file. Unset: LibTorch's
  /// default, fp32. Of a model in few bits it is that of what stays numbers (with `quantization`: unless its
  /// torch_dtype says that), and of a folder's own 4 bits also what products are computed in.
  std::optional<std::variant<std::string, at::ScalarType>> dtype;
  /// A map; a strategy of make_device_map(), with the classes of the model's blocks for no_split_module_classes; or a
  /// place for all of it ("cpu", "disk", "0"). Unset: "auto" with max_memory, else all on the accelerator, or on the
  /// host where there is none. Of a model in few bits, what is made for parts on disk goes to the system's folder for
  /// temporary files (TMPDIR), under no name once the model is loaded.
  std::optional<std::variant<std::string, DeviceMap>> device_map;
  std::optional<MaxMemory> max_memory;  ///< as LoadAndDispatchOptions
  /// Weights of linear layers are encoded while they are loaded. Of files that have them in few bits already it is an
  /// error.
  std::optional<BnbQuantizationConfig> quantization;
  /// Blocks of a .gguf file stay as they are in the file, which is mapped, and are frozen. Otherwise they are decoded.
  bool keep_codes = false;
  /// Of weights in few bits: products with the decoded weights, also where a kernel computes on the codes.
  bool exact_products = false;
};

/// All that the Auto classes have in common: a module, and the config.json that it was made by.
class ACCELERATE_API PretrainedModel {
 public:
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  /// The places of the weights, if from_pretrained() was asked to choose them; everything that is made of this model
  /// keeps the weights there.
  const std::optional<DispatchedModel>& dispatched() const { return dispatched_; }

  /// Writes a folder that from_pretrained() and transformers read: the weights, config.json with the fields that this
  /// model was made by, those it does not know among them, and generation_config.json if it lay beside that. Weights in
  /// few bits stay so. Those that lie on disk are in memory for one file at a time.
  /// @param max_shard_size  above it there are several files with an index; unset: "50GB". Weights in few bits are in
  /// one file: then it is an error.
  /// @throws CheckpointError, ResourceError; ConfigError for a model that no config.json describes, and for blocks of a
  /// .gguf file (keep_codes)
  void save_pretrained(const std::filesystem::path& folder,
                       const std::optional<std::string>& max_shard_size = std::nullopt) const;
  /// The same of other weights than the module's, by its names and whole: of a model in shards, what
  /// Accelerator::get_state_dict() gives rank 0. @throws CheckpointError that lists what does not fit the module
  void save_pretrained(const std::filesystem::path& folder, const std::map<std::string, at::Tensor>& weights,
                       const std::optional<std::string>& max_shard_size = std::nullopt) const;

  struct Source;  ///< private

 protected:
  explicit PretrainedModel(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}

  std::shared_ptr<torch::nn::Module> module_;
  std::optional<DispatchedModel> dispatched_;
  std::shared_ptr<const Source> source_;  ///< null: made by a program
};

/// A language model that goes from left to right. A value: copies share the module.
class ACCELERATE_API AutoModelForCausalLM : public PretrainedModel {
 public:
  using Forward =
      std::function<at::Tensor(const at::Tensor& input_ids, const at::Tensor& attention_mask,
                               const at::Tensor& position_ids, KeyValueCache* cache, int64_t logits_to_keep)>;
  AutoModelForCausalLM(std::shared_ptr<torch::nn::Module> module, Forward forward,
                       std::optional<int64_t> max_positions = std::nullopt)
      : PretrainedModel(std::move(module)), forward_(std::move(forward)), max_positions_(max_positions) {}

  /// Loads a folder: config.json, and safetensors or pytorch_model.bin, each one file or shards with an index; or a
  /// .gguf file. The model is in evaluation mode.
  /// @param report  Receives what was missing and what was left over.
  /// @throws CheckpointError if a file is missing or damaged, the architecture is not known or no such model, or names
  /// and shapes differ: all differences are listed. ConfigError for options that can't be; otherwise as
  /// load_checkpoint_and_dispatch() and load_and_quantize_model(), and nothing is loaded then.
  static AutoModelForCausalLM from_pretrained(const std::filesystem::path& folder, const AutoLoadOptions& options = {},
                                              LoadReport* report = nullptr);
  /// @param config  config.json, or the folder that holds it. @throws CheckpointError as from_pretrained().
  static AutoModelForCausalLM from_config(const std::filesystem::path& config, Weights weights = Weights::fresh);

  /// @param input_ids       [B, T] int64
  /// @param attention_mask  [B, S + T], 0 for padding, of any dtype; no padding where it is undefined
  /// @param position_ids    [B, T] or [1, T] int64; what the architecture counts by itself where it is undefined
  /// @param cache           Holds the S tokens before these, and these too afterwards; S is 0 where it is null.
  /// @param logits_to_keep  Logits of so many tokens, the last ones; 0: of all.
  /// @return logits [B, T or logits_to_keep, V]
  /// @throws ShapeError if shapes differ.
  at::Tensor forward(const at::Tensor& input_ids, const at::Tensor& attention_mask = {},
                     const at::Tensor& position_ids = {}, KeyValueCache* cache = nullptr,
                     int64_t logits_to_keep = 0) const {
    return forward_(input_ids, attention_mask, position_ids, cache, logits_to_keep);
  }
  at::Tensor operator()(const at::Tensor& input_ids, const at::Tensor& attention_mask = {},
                        const at::Tensor& position_ids = {}, KeyValueCache* cache = nullptr,
                        int64_t logits_to_keep = 0) const {
    return forward(input_ids, attention_mask, position_ids, cache, logits_to_keep);
  }

  /// module(), as LibTorch's holders have it. @{
  using ContainedType = torch::nn::Module;
  const std::shared_ptr<torch::nn::Module>& ptr() const { return module_; }
  /// @} Tokens that it has positions for, or was trained for (max_position_embeddings): generate() refuses more. Unset:
  /// no end, or not known.
  std::optional<int64_t> max_positions() const { return max_positions_; }

 private:
  Forward forward_;
  std::optional<int64_t> max_positions_;
};

/// An encoder whose result a decoder reads. A value: copies share the module.
class ACCELERATE_API AutoModelForSeq2SeqLM : public PretrainedModel {
 public:
  using Encode =
      std::function<AutoModelForCausalLM::Forward(const at::Tensor& input_ids, const at::Tensor& attention_mask)>;
  AutoModelForSeq2SeqLM(std::shared_ptr<torch::nn::Module> module, Encode encode)
      : PretrainedModel(std::move(module)), encode_(std::move(encode)) {}

  /// As AutoModelForCausalLM's.
  static AutoModelForSeq2SeqLM from_pretrained(const std::filesystem::path& folder, const AutoLoadOptions& options = {},
                                               LoadReport* report = nullptr);
  static AutoModelForSeq2SeqLM from_config(const std::filesystem::path& config, Weights weights = Weights::fresh);

  /// Runs the encoder and returns the decoder for this input: a causal model over the tokens of the answer, with keys
  /// and values of the input worked out once. Its batches have the rows of the input, or n of them for each row
  /// (beams), side by side.
  /// @param input_ids  [B, T] int64  @param attention_mask  [B, T], 0 for padding; may be undefined
  AutoModelForCausalLM encode(const at::Tensor& input_ids, const at::Tensor& attention_mask = {}) const {
    return {module_, encode_(input_ids, attention_mask)};
  }

 private:
  Encode encode_;
};

/// Any of the models, with inputs and outputs by transformers' names. A value: copies share the module.
class ACCELERATE_API AutoModel : public PretrainedModel {
 public:
  using Tensors = std::map<std::string, at::Tensor>;
  using Forward = std::function<Tensors(const Tensors& inputs)>;
  AutoModel(std::shared_ptr<torch::nn::Module> module, Forward forward)
      : PretrainedModel(std::move(module)), forward_(std::move(forward)) {}

  /// As AutoModelForCausalLM's.
  static AutoModel from_pretrained(const std::filesystem::path& folder, const AutoLoadOptions& options = {},
                                   LoadReport* report = nullptr);
  static AutoModel from_config(const std::filesystem::path& config, Weights weights = Weights::fresh);

  /// Language models: input_ids, attention_mask, position_ids (BERT: token_type_ids; T5: decoder_input_ids,
  /// decoder_attention_mask besides); images: pixel_values [B, C, H, W].
  /// @return "logits"; BertModel: "last_hidden_state" and "pooler_output".
  /// @throws ConfigError for an input that is missing or not known; ShapeError as the model.
  Tensors forward(const Tensors& inputs) const { return forward_(inputs); }
  Tensors operator()(const Tensors& inputs) const { return forward_(inputs); }

  /// module(), as LibTorch's holders have it. @{
  using ContainedType = torch::nn::Module;
  const std::shared_ptr<torch::nn::Module>& ptr() const { return module_; }
  /// @}

 private:
  Forward forward_;
};

}  // namespace accelerate::models
