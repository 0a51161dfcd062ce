#include "accelerator/parallelism.hpp"

#include <c10/util/Exception.h>

#include "accelerate/utils/error.hpp"
#include "utils/environment.hpp"

namespace accelerate {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw ConfigError("Accelerator: " + text); }

std::string source(bool by_program, const char* option, const char* variable) {
  return by_program ? std::string("AcceleratorOptions::") + option + " is set" : std::string(variable) + " is true";
}

}  // namespace

void refuse_missing_engines(const AcceleratorOptions& options) {
  if (options.deepspeed_plugin || parallel::deepspeed_requested()) {
    // Mistakes in the settings are told first: they would be in the way of any engine.
    const auto plugin = parallel::resolve(options.deepspeed_plugin.value_or(DeepSpeedPlugin{}));
    refuse(source(options.deepspeed_plugin.has_value(), "deepspeed_plugin", "ACCELERATE_USE_DEEPSPEED") +
           " with zero_stage " + std::to_string(*plugin.zero_stage) +
           ", but DeepSpeed is a Python library, expected AcceleratorOptions::fsdp_plugin (`accelerate launch "
           "--use_fsdp`). Its nearest settings are " +
           parallel::nearest_fsdp_settings(plugin));
  }
  if (options.megatron_lm_plugin || parallel::megatron_lm_requested()) {
    parallel::resolve(options.megatron_lm_plugin.value_or(MegatronLMPlugin{}));
    refuse(source(options.megatron_lm_plugin.has_value(), "megatron_lm_plugin", "ACCELERATE_USE_MEGATRON_LM") +
           ", but Megatron-LM is a Python program, which LibTorch can't run; leave it out, and shard with "
           "AcceleratorOptions::fsdp_plugin (`accelerate launch --use_fsdp`)");
  }
  const auto dynamo = resolve(TorchDynamoPlugin{});
  if (dynamo.backend != "no" && environment::integer({"RANK"}).value_or(0) == 0)
    TORCH_WARN("Accelerator: ACCELERATE_DYNAMO_BACKEND is ", *dynamo.backend,
               ", which has no effect: compiling models is torch.compile's, in Python. They run as they are.");
}

std::optional<ParallelismConfig> requested_parallelism(const AcceleratorOptions& options) {
  if (!options.parallelism_config && !parallel::parallelism_config_requested()) return std::nullopt;
  auto config = parallel::resolve(options.parallelism_config.value_or(ParallelismConfig{}));
  const auto missing = [](bool used, const char* field, int64_t size, const char* what) {
    if (used)
      refuse(std::string("the parallelism configuration has ") + field + " " + std::to_string(size) + ", but " + what +
             " parallelism is not in this version, expected 1; dp_replicate_size and dp_shard_size are here, and "
             "dp_shard_size also makes room for a model that is too large for one rank");
  };
  missing(config.tp_enabled(), "tp_size", *config.tp_size, "tensor");
  missing(config.cp_enabled(), "cp_size", *config.cp_size, "context");
  missing(config.sp_enabled(), "sp_size", *config.sp_size, "sequence");
  return config;
}

std::optional<FullyShardedDataParallelPlugin> requested_sharding(const AcceleratorOptions& options,
                                                                 const std::optional<ParallelismConfig>& parallelism) {
  const bool asked = options.fsdp_plugin || parallel::fsdp_requested();
  if (!asked && !(parallelism && parallelism->dp_shard_enabled())) return std::nullopt;
  auto plugin = options.fsdp_plugin.value_or(FullyShardedDataParallelPlugin{});
  if (!parallelism) return parallel::resolve(std::move(plugin));
  if (!asked) plugin.fsdp_version = 2;
  // Version 1 has no mesh: validate() refuses it.
  if (plugin.fsdp_version.value_or(environment::integer({"FSDP_VERSION"}).value_or(1)) == 2) {
    const auto from_config = [](std::optional<int64_t>& ranks, const std::optional<int64_t>& size, const char* name) {
      if (ranks && *ranks != *size)
        refuse(std::string("fsdp_plugin.") + name + " is " + std::to_string(*ranks) + ", but parallelism_config." +
               name + " is " + std::to_string(*size) + "; give one of them");
      ranks = size;
    };
    // A configuration without any axis says nothing about sharding; only the environment must not say it instead.
    if (parallelism->total_size() == 1) {
      if (!plugin.dp_replicate_size && !plugin.dp_shard_size) plugin.dp_replicate_size = 1;
      return parallel::resolve(std::move(plugin));
    }
    const bool replicas = parallelism->dp_replicate_enabled() && parallelism->dp_shard_enabled();
    if (replicas || plugin.dp_shard_size)
      from_config(plugin.dp_shard_size, parallelism->dp_shard_size, "dp_shard_size");
    from_config(plugin.dp_replicate_size, parallelism->dp_replicate_size, "dp_replicate_size");
  }
  return parallel::resolve(std::move(plugin));
}

}  // namespace accelerate
