#include "accelerate/parallel/megatron_lm_plugin.hpp"

#include <type_traits>

#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

enum class SettingKind { any, degree };  ///< a degree is 1 at least

/// f(field, name that Megatron-LM knows (null: none), MEGATRON_LM_… variable, default[, kind]) of each with a variable.
template <class Plugin, class F> void for_each_setting(Plugin& p, F&& f) {
  constexpr std::nullopt_t none = std::nullopt;
  f(p.tp_degree, "tensor_model_parallel_size", "TP_DEGREE", 1, SettingKind::degree);
  f(p.pp_degree, "pipeline_model_parallel_size", "PP_DEGREE", 1, SettingKind::degree);
  f(p.use_custom_fsdp, "use_custom_fsdp", "USE_CUSTOM_FSDP", false);
  f(p.overlap_cpu_optimizer_d2h_h2d, "overlap_cpu_optimizer_d2h_h2d", "OVERLAP_CPU_OPTIMIZER_D2H_H2D", false);
  f(p.no_load_optim, "no_load_optim", "NO_LOAD_OPTIM", false);
  f(p.eod_mask_loss, "eod_mask_loss", "EOD_MASK_LOSS", false);
  f(p.no_save_optim, "no_save_optim", "NO_SAVE_OPTIM", false);
  f(p.optimizer_cpu_offload, "optimizer_cpu_offload", "OPTIMIZER_CPU_OFFLOAD", false);
  f(p.use_precision_aware_optimizer, "use_precision_aware_optimizer", "USE_PRECISION_AWARE_OPTIMIZER", false);
  f(p.decoder_last_pipeline_num_layers, "decoder_last_pipeline_num_layers", "DECODER_LAST_PIPELINE_NUM_LAYERS", none);
  f(p.recompute_granularity, "recompute_granularity", "RECOMPUTE_GRANULARITY", "full");
  f(p.recompute_method, "recompute_method", "RECOMPUTE_METHOD", "uniform");
  f(p.recompute_num_layers, "recompute_num_layers", "RECOMPUTE_NUM_LAYERS", 1);
  f(p.attention_backend, "attention_backend", "ATTENTION_BACKEND", true);
  f(p.expert_model_parallel_size, "expert_model_parallel_size", "EXPERT_MODEL_PARALLEL_SIZE", 1, SettingKind::degree);
  f(p.context_parallel_size, "context_parallel_size", "CONTEXT_PARALLEL_SIZE", 2, SettingKind::degree);
  f(p.attention_dropout, "attention_dropout", "ATTENTION_DROPOUT", 0);
  f(p.hidden_dropout, "hidden_dropout", "HIDDEN_DROPOUT", 0);
  f(p.attention_softmax_in_fp32, "attention_softmax_in_fp32", "ATTENTION_SOFTMAX_IN_FP32", true);
  f(p.expert_tensor_parallel_size, "expert_tensor_parallel_size", "EXPERT_TENSOR_PARALLEL_SIZE", 1,
    SettingKind::degree);
  f(p.calculate_per_token_loss, "calculate_per_token_loss", "CALCULATE_PER_TOKEN_LOSS", true);
  f(p.use_rotary_position_embeddings, "use_rotary_position_embeddings", "USE_ROTARY_POSITION_EMBEDDINGS", true);
  f(p.num_micro_batches, "num_micro_batches", "NUM_MICRO_BATCHES", 1, SettingKind::degree);
  f(p.gradient_clipping, "clip_grad", "GRADIENT_CLIPPING", 1.0);
  f(p.sequence_parallelism, "sequence_parallel", "SEQUENCE_PARALLELISM", false);
  f(p.recompute_activations, nullptr, "RECOMPUTE_ACTIVATIONS", false);
  f(p.use_distributed_optimizer, "use_distributed_optimizer", "USE_DISTRIBUTED_OPTIMIZER", false);
}

template <class T> std::optional<T> from_variable(const char* variable) {
  if constexpr (std::is_same_v<T, bool>) return environment::flag(variable);
  else if constexpr (std::is_same_v<T, double>) return environment::number(variable);
  else if constexpr (std::is_same_v<T, int64_t>) return environment::integer({variable});
  else return environment::text(variable);
}

}  // namespace

KwargsDict MegatronLMPlugin::megatron_lm_default_args() const {
  const auto or_null = [](const auto& field) { return field ? KwargsValue(*field) : KwargsValue(nullptr); };
  // Megatron's own data parallelism where gradients don't lie in one bucket per rank.
  const bool local = pp_degree.value_or(1) > 1 || use_distributed_optimizer.value_or(false);
  KwargsDict args{{"pipeline_model_parallel_split_rank", or_null(pipeline_model_parallel_split_rank)},
                  {"num_layers_per_virtual_pipeline_stage", or_null(num_layers_per_virtual_pipeline_stage)},
                  {"DDP_impl", local ? "local" : "torch"},
                  {"consumed_samples", or_null(consumed_samples)},
                  {"no_wd_decay_cond", nullptr},  // these two are Python functions
                  {"scale_lr_cond", nullptr},
                  {"lr_mult", lr_mult},
                  {"megatron_dataset_flag", megatron_dataset_flag},
                  {"eval_iters", eval_iters},
                  {"eval_interval", eval_interval}};
  for_each_setting(*this, [&](const auto& field, const char* name, const char*, auto, SettingKind = {}) {
    if (name) args[name] = or_null(field);
  });
  if (tensorboard_dir) args["tensorboard_dir"] = *tensorboard_dir;
  for (const auto& [name, value] : other_megatron_args) args[name] = value;
  return args;
}

namespace parallel {

bool megatron_lm_requested() { return environment::flag("ACCELERATE_USE_MEGATRON_LM").value_or(false); }

MegatronLMPlugin resolve(MegatronLMPlugin plugin) {
  for_each_setting(
      plugin, [](auto& field, const char*, const char* variable, auto otherwise, SettingKind kind = SettingKind::any) {
        using T = typename std::decay_t<decltype(field)>::value_type;
        const std::string name = std::string("MEGATRON_LM_") + variable;
        if (!field) field = from_variable<T>(name.c_str());
        if (!field) field = otherwise;
        if constexpr (std::is_same_v<T, int64_t>)
          if (kind == SettingKind::degree && *field < 1)
            raise<ConfigError>("Megatron-LM plugin: the setting of {} is {}, expected 1 at least", name, *field);
      });
  if (plugin.consumed_samples && !plugin.consumed_samples->empty() && plugin.consumed_samples->size() < 3)
    plugin.consumed_samples->resize(3, 0);
  return plugin;
}

}  // namespace parallel
}  // namespace accelerate
