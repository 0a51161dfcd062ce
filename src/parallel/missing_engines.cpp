/// Engines of the reference that can't be here: who asks for one is told what comes nearest.

#include "parallel/engines.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

std::string source_of(bool by_program, const char* option, const char* variable) {
  return by_program ? fmt::format("AcceleratorOptions::{} is set", option) : fmt::format("{} is true", variable);
}

}  // namespace

std::unique_ptr<ChosenLayer> choose_deepspeed(const EngineRequest& request) {
  if (!request.deepspeed && !deepspeed_requested()) return nullptr;
  // Mistakes in the settings are told first: they would be in the way of any engine.
  const auto plugin = resolve(request.deepspeed.value_or(DeepSpeedPlugin{}));
  raise<ConfigError>(
      "Accelerator: {} with zero_stage {}, but DeepSpeed is a Python library, expected AcceleratorOptions::fsdp_plugin "
      "(`accelerate launch --use_fsdp`). Its nearest settings are {}",
      source_of(request.deepspeed.has_value(), "deepspeed_plugin", "ACCELERATE_USE_DEEPSPEED"), *plugin.zero_stage,
      nearest_fsdp_settings(plugin));
}

std::unique_ptr<ChosenLayer> choose_megatron_lm(const EngineRequest& request) {
  if (!request.megatron_lm && !megatron_lm_requested()) return nullptr;
  resolve(request.megatron_lm.value_or(MegatronLMPlugin{}));
  raise<ConfigError>(
      "Accelerator: {}, but Megatron-LM is a Python program, which LibTorch can't run; leave it out, and shard with "
      "AcceleratorOptions::fsdp_plugin (`accelerate launch --use_fsdp`)",
      source_of(request.megatron_lm.has_value(), "megatron_lm_plugin", "ACCELERATE_USE_MEGATRON_LM"));
}

}  // namespace accelerate::parallel
