#pragma once

/// Low-rank adapters (LoRA) on the linear layers of any model, in the files of Hugging Face's PEFT.
///
/// A product x W^T becomes x W^T + (x A^T) B^T * scaling, with A [r, inputs] and B [outputs, r]. No module is replaced
/// and none needs to know: what the model computes with an adapted weight is seen as it is computed.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

enum class LoraInit : uint8_t {
  kaiming,   ///< A uniform in +-1/sqrt(inputs), B zero: the model starts as it was. PEFT's true
  gaussian,  ///< A normal with deviation 1/r, B zero
  random,    ///< A and B uniform, so that they change the model from the start: for tests. PEFT's false
};

/// PEFT's names and defaults (peft 0.21).
struct ACCELERATE_API LoraConfig {
  /// Rank: rows of A, columns of B.
  int64_t r = 8;
  double lora_alpha = 8;
  /// Share of x that is zeroed before A while the module is in training mode.
  double lora_dropout = 0;
  /// Modules by name ("encoder.layer.0.attention.self.query") or end of a name ("query"); the one entry "all-linear":
  /// all that PEFT takes for linear layers (Linear, which the zoo's Dense is, too, and Conv1D), but the last one of a
  /// model with a head for tokens ("lm_head", "embed_out" of GPT-NeoX), or, with the task_type "SEQ_CLS", one with a
  /// head for classes ("score", else "classifier").
  std::vector<std::string> target_modules;
  /// Left out of those, in the same way.
  std::vector<std::string> exclude_modules;
  /// Other ranks and alphas, by a regular expression for the end of a module's name (after a dot) or all of it. The
  /// first that fits counts, and each is there once.
  std::vector<std::pair<std::string, int64_t>> rank_pattern;
  std::vector<std::pair<std::string, double>> alpha_pattern;
  /// scaling is lora_alpha / sqrt(r), not lora_alpha / r.
  bool use_rslora = false;
  /// Weights are [inputs, outputs], of modules whose class does not say so: Linear's and the zoo's never are, but
  /// Conv1D's always.
  bool fan_in_fan_out = false;
  LoraInit init_lora_weights = LoraInit::kaiming;
  /// Modules that are trained and saved whole, by a name or the end of one; they are no targets. With the task_type
  /// "SEQ_CLS" or "TOKEN_CLS" also "classifier" and "score", as in PEFT.
  std::vector<std::string> modules_to_save;
  /// Biases that are trained and saved: "none", "all", or "lora_only", those of targets.
  std::string bias = "none";
  /// Rows of embeddings that a file brings along, by the end of the embedding's name; empty: all embeddings'. They are
  /// not trained here.
  std::vector<std::pair<std::string, std::vector<int64_t>>> trainable_token_indices;
  /// For the file, which says to whom the adapter belongs ("HuggingFaceTB/SmolLM2-135M-Instruct") …
  std::string base_model_name_or_path;
  /// … and which class of PEFT loads it ("CAUSAL_LM", "FEATURE_EXTRACTION", …).
  std::string task_type;
};

namespace detail {
struct LoraLayer;
struct OwnValues;
}  // namespace detail

/// A model's adapter. Cheap to copy; copies share it. The adapter belongs to the model, and goes with it, not with
/// this.
class ACCELERATE_API LoraAdapter {
 public:
  const LoraConfig& config() const { return *config_; }
  /// As the model has them, too: "layers.0.q_proj.lora_A.weight", "….lora_B.weight", …, and what the adapter has
  /// instead of the model's own values: "classifier.weight".
  NamedTensors parameters() const;

  /// Off: the model computes as without it. Gradients and files are not concerned. @throws ConfigError where it has
  /// values of its own for parameters whose bytes a residency keeps
  void set_enabled(bool enabled) const;
  /// Adds B A * scaling to the weights, so that the adapter costs nothing more; unmerge() subtracts it again, which
  /// gives the weights back but for rounding. Nothing where it is so already.
  /// @throws ConfigError for weights whose bytes a residency keeps (sharded, offloaded, quantized): save the adapter
  /// and load it into a whole model.
  void merge() const;
  void unmerge() const;
  bool merged() const;
  /// Takes A and B out of the model; weights stay as they are, merged or not, and frozen.
  void remove() const;

  /// Writes adapter_config.json and adapter_model.safetensors, which PEFT loads, into `folder`, which is made. On the
  /// rank that calls it.
  /// @throws CheckpointError, ResourceError; ConfigError where A and B are sharded over ranks.
  void save(const std::filesystem::path& folder) const;
  /// The same with values from a state of the model: `if (is_main_process()) adapter.save(folder, state)`, where state
  /// is Accelerator::get_state_dict(model), under FSDP.
  void save(const std::filesystem::path& folder, const std::map<std::string, at::Tensor>& state) const;

 private:
  friend LoraAdapter add_adapter(const ModelRef&, const LoraConfig&);
  friend LoraAdapter load_adapter(const ModelRef&, const std::filesystem::path&, bool);
  LoraAdapter() = default;
  std::shared_ptr<const LoraConfig> config_;
  std::vector<std::shared_ptr<detail::LoraLayer>> layers_;
  std::vector<std::shared_ptr<detail::OwnValues>> own_;
};

/// Freezes all of the model's parameters and gives each target a child "lora_A" and a child "lora_B" with a trained
/// parameter "weight", in fp32 (fp64 for weights in fp64) on the weight's device. From then on the operators linear,
/// addmm, mm and matmul on a target's weight, or on the whole of it transposed, add the adapter's part. Call it before
/// prepare(), on every rank; optimizers take the model's parameters(), of which only the adapter's get gradients.
/// @param model  any LibTorch module; weights may be members of a residency, as dispatch_model makes them.
/// @throws ConfigError, and leaves the model as it was, for targets that match nothing, that have no weight of two
/// dimensions (Embedding and convolutions are refused by name), that have an adapter already, that are deferred or
/// sharded (prepared); for options out of range; and for script modules. While the model computes: ConfigError for
/// operators that take an adapted weight in a way that is not known.
/// Source: arXiv:2106.09685; names, initial values and results as PEFT's LoraModel.
ACCELERATE_API LoraAdapter add_adapter(const ModelRef& model, const LoraConfig& config);

/// Adds the adapter that a folder holds, written by save() or by PEFT's save_pretrained(): adapter_model.safetensors,
/// or else adapter_model.bin. Its tensors say which modules it is for; tensors of layers that layers_to_transform
/// leaves out are ignored, as in PEFT. Tensors of the model itself (modules_to_save, biases, embeddings, rows of them)
/// take the place of the model's.
/// @param is_trainable  go on training it; else its parameters are frozen, too
/// @throws CheckpointError, and leaves the model as it was, where files are missing or damaged, tensors fit no module,
/// or the config asks for what is not offered: other kinds than LoRA, use_dora, training rows of embeddings,
/// target_parameters, initial values that change the base model (PiSSA, OLoRA, …), …
ACCELERATE_API LoraAdapter load_adapter(const ModelRef& model, const std::filesystem::path& folder,
                                        bool is_trainable = false);

}  // namespace accelerate
