#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/pimpl.h>

#include "accelerate/model/hidden_size.hpp"
#include "accelerate/models/key_value_cache.hpp"
#include "accelerate/models/pretrained.hpp"
#include "accelerate/utils/export.hpp"

/// The LLaMA family: LLaMA 1 to 3.x and what was trained in its form (SmolLM, …), Mistral, Qwen2 and Mixtral, with the
/// parameter names of Hugging Face's folders, so that these load and the folders saved here load in Python's
/// transformers. Shapes: B batch, T new tokens, S tokens in a cache, D hidden_size, V vocab_size. Source:
/// arXiv:2302.13971, arXiv:2407.21783; grouped queries arXiv:2305.13245; rotary positions arXiv:2104.09864; Mistral
/// arXiv:2310.06825; Qwen2 arXiv:2407.10671; Mixtral arXiv:2401.04088; the architectures as transformers has them.
namespace accelerate::models {

namespace detail {
class Dense;
class RmsNorm;
}  // namespace detail

/// How rotary frequencies are stretched for contexts longer than those of the first training; the types and their
/// fields are transformers'.
struct ACCELERATE_API LlamaRopeScaling {
  /// "default": not at all. "linear": all by `factor`. "dynamic": the base grows with the sequence once that is longer
  /// than max_position_embeddings. "yarn": low frequencies by `factor`, high ones not at all, and a ramp between them.
  /// "longrope": each by its own number, of one list for short sequences and another for long ones. "llama3": as yarn,
  /// with another ramp. "proportional": all by `factor`, and only the first partial_rotary_factor of them turn. Source:
  /// arXiv:2309.00071 (yarn, which describes dynamic too), arXiv:2402.13753 (longrope), arXiv:2407.21783 (llama3).
  std::string type = "default";
  double factor = 1;
  double low_freq_factor = 1, high_freq_factor = 4;  ///< llama3: waves longer than original / low are low frequencies,
                                                     ///< shorter than original / high are high ones.
  int64_t original_max_position_embeddings = 8192;   ///< llama3, yarn, longrope: context of the first training, in
                                                     ///< tokens; longrope: sequences up to it are short.
  std::optional<double> attention_factor;  ///< yarn, longrope: what cosines and sines are multiplied by; the sources'
                                           ///< recommendation for `factor` where it is not given.
  /// Yarn: where neither is 0, they weigh `factor` in the recommended attention_factor.
  double mscale = 0, mscale_all_dim = 0;
  /// Yarn: how often a frequency turns in the original context where the ramp begins and where it ends.
  double beta_fast = 32, beta_slow = 1;
  bool truncate = true;                           ///< yarn: the ramp begins and ends at whole numbers of frequencies.
  std::vector<double> short_factor, long_factor;  ///< longrope: one number for each frequency.
  double partial_rotary_factor = 1;               ///< proportional

  /// Whether frequencies change with the length of the sequence. Keys in a cache keep those that they were turned by.
  bool follows_length() const { return type == "dynamic" || type == "longrope"; }
  /// @param dimensions  Of a head that are turned: where it is given, lists are checked to be as long.
  /// @throws ConfigError naming the first field that is out of range.
  void validate(std::optional<int64_t> dimensions = std::nullopt) const;
};

/// The fields of config.json; defaults are transformers', those of Llama-2-7b.
struct ACCELERATE_API LlamaConfig {
  /// llama, mistral, qwen2 or mixtral: begins the names of the modules' classes (LlamaDecoderLayer,
  /// MistralDecoderLayer, …), by which units are chosen. These architectures differ in the fields below.
  std::string model_type = "llama";
  int64_t vocab_size = 32000;
  int64_t hidden_size = 4096;
  int64_t intermediate_size = 11008;
  int64_t num_hidden_layers = 32;
  int64_t num_attention_heads = 32;
  /// Fewer than num_attention_heads: grouped queries. As many where it is not given.
  std::optional<int64_t> num_key_value_heads;
  std::optional<int64_t> head_dim;  ///< hidden_size / num_attention_heads where it is not given.
  std::string hidden_act = "silu";  ///< As BertConfig::hidden_act.
  /// The number of positions that it was trained for. The forward takes more, as rotary positions have no end;
  /// generate() does not.
  int64_t max_position_embeddings = 2048;
  double initializer_range = 0.02;  ///< Standard deviation of fresh weights.
  double rms_norm_eps = 1e-6;
  std::optional<int64_t> pad_token_id;  ///< Its embedding gets no gradient.
  bool tie_word_embeddings = false;     ///< The head multiplies by the embeddings.
  double rope_theta = 10000;
  LlamaRopeScaling rope_scaling;
  bool attention_bias = false;            ///< Of the four projections.
  bool qkv_bias = false;                  ///< Of the projections but the last (Qwen2).
  std::optional<int64_t> sliding_window;  ///< How many tokens each sees at most, itself included (Mistral).
  std::vector<std::string> layer_types;  ///< "full_attention" or "sliding_attention" for each layer; empty: where there
                                         ///< is a window it is everywhere.
  /// MLPs of each layer, of which a router chooses for each token (Mixtral); 0: one, no router.
  int64_t num_local_experts = 0;
  int64_t num_experts_per_tok = 2;
  bool mlp_bias = false;
  double attention_dropout = 0;
  std::string other_fields =
      "{}";  ///< The JSON that was read, so that saving keeps the fields that are not listed here.

  int64_t key_value_heads() const { return num_key_value_heads.value_or(num_attention_heads); }
  int64_t head_size() const { return head_dim.value_or(hidden_size / num_attention_heads); }
  /// Begins class names, e.g. "Llama".
  std::string family() const;
  /// Whether this layer sees no more than sliding_window tokens.
  bool slides(int64_t layer) const {
    return sliding_window && (layer_types.empty() || layer_types[layer] == "sliding_attention");
  }

  /// @throws ConfigError naming the first field that is out of range or not supported, with its value.
  void validate() const;
  /// Reads `config.json` of a folder, or such a file, or the metadata of a .gguf file. @throws CheckpointError if it is
  /// missing, malformed, of another model type or not valid.
  static LlamaConfig from_pretrained(const std::filesystem::path& folder);
};

struct LlamaLoadOptions {
  /// Of the parameters; the files' are converted. Unset: LibTorch's default, fp32.
  std::optional<at::ScalarType> dtype;
};

/// Its layers are of class LlamaDecoderLayer, or the family's: the unit of sharding (transformer_cls_names_to_wrap).
class ACCELERATE_API LlamaModelImpl : public torch::nn::Cloneable<LlamaModelImpl>, public HasHiddenSize {
 public:
  /// @throws ConfigError as LlamaConfig::validate.
  explicit LlamaModelImpl(const LlamaConfig& config, Weights weights = Weights::fresh);
  void reset() override;

  /// @param input_ids       [B, T] int64
  /// @param attention_mask  [B, S + T], 0 for padding, of any dtype; no padding where it is undefined
  /// @param position_ids    [B, T] or [1, T] int64; S, S + 1, … where it is undefined
  /// @param cache           Holds the S tokens before these, and these too afterwards; S is 0 where it is null.
  /// @return the last hidden states [B, T, D]
  /// @throws ShapeError if shapes differ.
  torch::Tensor forward(const torch::Tensor& input_ids, const torch::Tensor& attention_mask = {},
                        const torch::Tensor& position_ids = {}, KeyValueCache* cache = nullptr);

  const LlamaConfig& config() const { return config_; }
  int64_t hidden_size() const override { return config_.hidden_size; }
  const torch::nn::Embedding& embed_tokens() const { return embed_tokens_; }
  /// Writes config.json and model.safetensors; creates the folder. @throws CheckpointError, ResourceError
  void save_pretrained(const std::filesystem::path& folder) const;
  /// The same of these weights, by the model's own names: what Accelerator::get_state_dict() gives rank 0 of a model
  /// that is sharded, whose own are elsewhere. @throws CheckpointError where one is missing, has another shape or
  /// belongs to another model
  void save_pretrained(const std::filesystem::path& folder, const std::map<std::string, at::Tensor>& weights) const;

 private:
  LlamaConfig config_;
  torch::nn::Embedding embed_tokens_ = nullptr;
  torch::nn::ModuleList layers_ = nullptr;
  std::shared_ptr<detail::RmsNorm> norm_;
};

/// Handle of a LlamaModelImpl, as torch::nn's modules have.
class ACCELERATE_API LlamaModel : public torch::nn::ModuleHolder<LlamaModelImpl> {
 public:
  using Impl = LlamaModelImpl;
  using torch::nn::ModuleHolder<LlamaModelImpl>::ModuleHolder;
  /// Loads a Hugging Face folder (config.json and safetensors, one file or shards), saved with or without a head; or a
  /// .gguf file, decoded.
  /// @param report  Receives what was missing and what was left over.
  /// @throws CheckpointError if a file is missing or damaged, a shape differs (all of them are listed), or a parameter
  /// is missing.
  static LlamaModel from_pretrained(const std::filesystem::path& folder, const LlamaLoadOptions& options = {},
                                    LoadReport* report = nullptr);
};

class ACCELERATE_API LlamaForCausalLMImpl : public torch::nn::Cloneable<LlamaForCausalLMImpl> {
 public:
  /// @throws ConfigError as LlamaConfig::validate.
  explicit LlamaForCausalLMImpl(const LlamaConfig& config, Weights weights = Weights::fresh);
  void reset() override;

  /// @param logits_to_keep  Logits of so many tokens, the last ones; 0: of all.
  /// @return logits [B, T or logits_to_keep, V]; the other parameters as LlamaModelImpl::forward.
  torch::Tensor forward(const torch::Tensor& input_ids, const torch::Tensor& attention_mask = {},
                        const torch::Tensor& position_ids = {}, KeyValueCache* cache = nullptr,
                        int64_t logits_to_keep = 0);

  const LlamaConfig& config() const { return config_; }
  /// For generate(), which refuses more tokens: max_position_embeddings; unset where rotary positions grow with the
  /// text (rope_scaling of type dynamic).
  std::optional<int64_t> max_positions() const;
  /// As LlamaModelImpl::save_pretrained.
  void save_pretrained(const std::filesystem::path& folder) const;
  void save_pretrained(const std::filesystem::path& folder, const std::map<std::string, at::Tensor>& weights) const;

 private:
  LlamaConfig config_;
  LlamaModel model_ = nullptr;
  std::shared_ptr<detail::Dense> lm_head_;  ///< Null where the embeddings are the head.
};

/// Handle of a LlamaForCausalLMImpl.
class ACCELERATE_API LlamaForCausalLM : public torch::nn::ModuleHolder<LlamaForCausalLMImpl> {
 public:
  using Impl = LlamaForCausalLMImpl;
  using torch::nn::ModuleHolder<LlamaForCausalLMImpl>::ModuleHolder;
  /// As LlamaModel::from_pretrained; a missing head is initialised freshly and reported.
  static LlamaForCausalLM from_pretrained(const std::filesystem::path& folder, const LlamaLoadOptions& options = {},
                                          LoadReport* report = nullptr);
};

}  // namespace accelerate::models
