#pragma once

/// Megatron-LM's settings: the reference's MegatronLMPlugin. Needs no LibTorch.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/utils/export.hpp"
#include "accelerate/utils/kwargs_dict.hpp"

namespace accelerate {

/// Fields that are unset come from MEGATRON_LM_<FIELD>, which `accelerate launch --use_megatron_lm` sets, else the
/// default stands here; what is set wins. A field whose comment names no default is read by nobody but Megatron-LM, and
/// stays as it is. The reference's fields that hold Python functions and classes are left out. Read by
/// `parallel::resolve`; `Accelerator` refuses it, because Megatron-LM is a Python program. Source: accelerate 1.15.0,
/// MegatronLMPlugin. Conformance: kwargs_megatron.json.
struct ACCELERATE_API MegatronLMPlugin {
  /// Ranks that split each layer, and ranks that hold consecutive layers; 1.
  std::optional<int64_t> tp_degree, pp_degree;
  /// All false.
  std::optional<bool> use_custom_fsdp, overlap_cpu_optimizer_d2h_h2d, no_load_optim, eod_mask_loss, no_save_optim,
      optimizer_cpu_offload, use_precision_aware_optimizer;
  /// Unset: layers are split evenly.
  std::optional<int64_t> decoder_last_pipeline_num_layers;
  /// "full" or "selective"; full.
  std::optional<std::string> recompute_granularity;
  /// "uniform" or "block"; uniform.
  std::optional<std::string> recompute_method;
  /// 1.
  std::optional<int64_t> recompute_num_layers;
  /// true.
  std::optional<bool> attention_backend;
  /// 1.
  std::optional<int64_t> expert_model_parallel_size;
  /// 2, as the reference has it.
  std::optional<int64_t> context_parallel_size;
  /// 0.
  std::optional<double> attention_dropout, hidden_dropout;
  /// true.
  std::optional<bool> attention_softmax_in_fp32;
  /// 1.
  std::optional<int64_t> expert_tensor_parallel_size;
  /// true.
  std::optional<bool> calculate_per_token_loss, use_rotary_position_embeddings;
  /// 1.
  std::optional<int64_t> num_micro_batches;
  /// Largest norm of gradients, 0 for any; 1.0.
  std::optional<double> gradient_clipping;
  /// All false.
  std::optional<bool> sequence_parallelism, recompute_activations, use_distributed_optimizer;
  /// The rank at which encoder and decoder part.
  std::optional<int64_t> pipeline_model_parallel_split_rank;
  std::optional<int64_t> num_layers_per_virtual_pipeline_stage;
  /// Of several loaders' batch sizes the smallest counts as the one of training.
  bool is_train_batch_min = true;
  std::optional<int64_t> train_iters, train_samples;
  /// "constant", "linear" or "cosine".
  std::string weight_decay_incr_style = "constant";
  std::optional<double> start_weight_decay, end_weight_decay;
  /// "constant", "linear" or "cosine".
  std::string lr_decay_style = "linear";
  std::optional<int64_t> lr_decay_iters, lr_decay_samples, lr_warmup_iters, lr_warmup_samples;
  std::optional<double> lr_warmup_fraction;
  double min_lr = 0;
  /// Samples seen by the loaders of training, validation and test; with fewer than three numbers the rest is 0.
  std::optional<std::vector<int64_t>> consumed_samples;
  double lr_mult = 1.0;
  /// Data sets are in Megatron-LM's own format.
  bool megatron_dataset_flag = false;
  std::optional<int64_t> seq_length, encoder_seq_length, decoder_seq_length;
  std::optional<std::string> tensorboard_dir;
  int64_t eval_iters = 100, eval_interval = 1000;
  bool return_logits = false;
  /// More arguments for Megatron-LM; they win over those below.
  KwargsDict other_megatron_args;

  /// Of a resolved plugin: the arguments that Megatron-LM gets, by its own names.
  KwargsDict megatron_lm_default_args() const;
};

namespace parallel {

/// Whether ACCELERATE_USE_MEGATRON_LM is true. @throws ConfigError when it is no truth value.
ACCELERATE_API bool megatron_lm_requested();

/// The plugin with every field decided that has a default. @throws ConfigError when a variable is no number or truth
/// value, or a degree is below 1.
ACCELERATE_API MegatronLMPlugin resolve(MegatronLMPlugin plugin);

}  // namespace parallel
}  // namespace accelerate
