#include "accelerate/parallel/megatron_lm_plugin.hpp"

#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate {

KwargsDict MegatronLMPlugin::megatron_lm_default_args() const {
  const auto or_null = [](const auto& field) { return field ? KwargsValue(*field) : KwargsValue(nullptr); };
  // Megatron's own data parallelism where gradients don't lie in one bucket per rank.
  const bool local = pp_degree.value_or(1) > 1 || use_distributed_optimizer.value_or(false);
  KwargsDict args{{"tensor_model_parallel_size", or_null(tp_degree)},
                  {"pipeline_model_parallel_size", or_null(pp_degree)},
                  {"pipeline_model_parallel_split_rank", or_null(pipeline_model_parallel_split_rank)},
                  {"num_layers_per_virtual_pipeline_stage", or_null(num_layers_per_virtual_pipeline_stage)},
                  {"DDP_impl", local ? "local" : "torch"},
                  {"use_distributed_optimizer", or_null(use_distributed_optimizer)},
                  {"sequence_parallel", or_null(sequence_parallelism)},
                  {"clip_grad", or_null(gradient_clipping)},
                  {"num_micro_batches", or_null(num_micro_batches)},
                  {"consumed_samples", or_null(consumed_samples)},
                  {"no_wd_decay_cond", nullptr},  // these two are Python functions
                  {"scale_lr_cond", nullptr},
                  {"lr_mult", lr_mult},
                  {"megatron_dataset_flag", megatron_dataset_flag},
                  {"eval_iters", eval_iters},
                  {"eval_interval", eval_interval},
                  {"use_custom_fsdp", or_null(use_custom_fsdp)},
                  {"no_load_optim", or_null(no_load_optim)},
                  {"eod_mask_loss", or_null(eod_mask_loss)},
                  {"no_save_optim", or_null(no_save_optim)},
                  {"optimizer_cpu_offload", or_null(optimizer_cpu_offload)},
                  {"overlap_cpu_optimizer_d2h_h2d", or_null(overlap_cpu_optimizer_d2h_h2d)},
                  {"use_precision_aware_optimizer", or_null(use_precision_aware_optimizer)},
                  {"decoder_last_pipeline_num_layers", or_null(decoder_last_pipeline_num_layers)},
                  {"recompute_granularity", or_null(recompute_granularity)},
                  {"recompute_method", or_null(recompute_method)},
                  {"recompute_num_layers", or_null(recompute_num_layers)},
                  {"attention_backend", or_null(attention_backend)},
                  {"expert_model_parallel_size", or_null(expert_model_parallel_size)},
                  {"context_parallel_size", or_null(context_parallel_size)},
                  {"attention_dropout", or_null(attention_dropout)},
                  {"hidden_dropout", or_null(hidden_dropout)},
                  {"attention_softmax_in_fp32", or_null(attention_softmax_in_fp32)},
                  {"expert_tensor_parallel_size", or_null(expert_tensor_parallel_size)},
                  {"calculate_per_token_loss", or_null(calculate_per_token_loss)},
                  {"use_rotary_position_embeddings", or_null(use_rotary_position_embeddings)}};
  if (tensorboard_dir) args["tensorboard_dir"] = *tensorboard_dir;
  for (const auto& [name, value] : other_megatron_args) args[name] = value;
  return args;
}

namespace parallel {

bool megatron_lm_requested() { return environment::flag("ACCELERATE_USE_MEGATRON_LM").value_or(false); }

MegatronLMPlugin resolve(MegatronLMPlugin plugin) {
  const auto integer = [](std::optional<int64_t>& field, const char* name, std::optional<int64_t> otherwise) {
    if (!field) field = environment::integer({name});
    if (!field) field = otherwise;
  };
  const auto degree = [&](std::optional<int64_t>& field, const char* name, int64_t otherwise = 1) {
    integer(field, name, otherwise);
    if (*field < 1)
      raise<ConfigError>("Megatron-LM plugin: the setting of {} is {}, expected 1 at least", name, *field);
  };
  const auto number = [](std::optional<double>& field, const char* name, double otherwise) {
    if (!field) field = environment::number(name).value_or(otherwise);
  };
  const auto flag = [](std::optional<bool>& field, const char* name, bool otherwise) {
    if (!field) field = environment::flag(name).value_or(otherwise);
  };
  const auto text = [](std::optional<std::string>& field, const char* name, const char* otherwise) {
    if (!field) field = environment::text(name).value_or(otherwise);
  };
  degree(plugin.tp_degree, "MEGATRON_LM_TP_DEGREE");
  degree(plugin.pp_degree, "MEGATRON_LM_PP_DEGREE");
  flag(plugin.use_custom_fsdp, "MEGATRON_LM_USE_CUSTOM_FSDP", false);
  flag(plugin.overlap_cpu_optimizer_d2h_h2d, "MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D", false);
  flag(plugin.no_load_optim, "MEGATRON_LM_NO_LOAD_OPTIM", false);
  flag(plugin.eod_mask_loss, "MEGATRON_LM_EOD_MASK_LOSS", false);
  flag(plugin.no_save_optim, "MEGATRON_LM_NO_SAVE_OPTIM", false);
  flag(plugin.optimizer_cpu_offload, "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD", false);
  flag(plugin.use_precision_aware_optimizer, "MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER", false);
  integer(plugin.decoder_last_pipeline_num_layers, "MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS", std::nullopt);
  text(plugin.recompute_granularity, "MEGATRON_LM_RECOMPUTE_GRANULARITY", "full");
  text(plugin.recompute_method, "MEGATRON_LM_RECOMPUTE_METHOD", "uniform");
  integer(plugin.recompute_num_layers, "MEGATRON_LM_RECOMPUTE_NUM_LAYERS", 1);
  flag(plugin.attention_backend, "MEGATRON_LM_ATTENTION_BACKEND", true);
  degree(plugin.expert_model_parallel_size, "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE");
  degree(plugin.context_parallel_size, "MEGATRON_LM_CONTEXT_PARALLEL_SIZE", 2);
  number(plugin.attention_dropout, "MEGATRON_LM_ATTENTION_DROPOUT", 0);
  number(plugin.hidden_dropout, "MEGATRON_LM_HIDDEN_DROPOUT", 0);
  flag(plugin.attention_softmax_in_fp32, "MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32", true);
  degree(plugin.expert_tensor_parallel_size, "MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE");
  flag(plugin.calculate_per_token_loss, "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS", true);
  flag(plugin.use_rotary_position_embeddings, "MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS", true);
  degree(plugin.num_micro_batches, "MEGATRON_LM_NUM_MICRO_BATCHES");
  number(plugin.gradient_clipping, "MEGATRON_LM_GRADIENT_CLIPPING", 1.0);
  flag(plugin.sequence_parallelism, "MEGATRON_LM_SEQUENCE_PARALLELISM", false);
  flag(plugin.recompute_activations, "MEGATRON_LM_RECOMPUTE_ACTIVATIONS", false);
  flag(plugin.use_distributed_optimizer, "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER", false);
  if (plugin.consumed_samples && !plugin.consumed_samples->empty() && plugin.consumed_samples->size() < 3)
    plugin.consumed_samples->resize(3, 0);
  return plugin;
}

}  // namespace parallel
}  // namespace accelerate
