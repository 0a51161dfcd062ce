/// Engines of the reference that can't be here: a program that asks for one is told what comes nearest.

#include "parallel/engines.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {

std::unique_ptr<ChosenLayer> choose_megatron_lm(const EngineRequest& request) {
  if (!request.megatron_lm && !megatron_lm_requested()) return nullptr;
  resolve(request.megatron_lm.value_or(MegatronLMPlugin{}));
  raise<ConfigError>(
      "Accelerator: {}, but Megatron-LM is a Python program, which LibTorch can't run; leave it out, and shard with "
      "AcceleratorOptions::fsdp_plugin (`accelerate launch --use_fsdp`)",
      request.megatron_lm ? "AcceleratorOptions::megatron_lm_plugin is set" : "ACCELERATE_USE_MEGATRON_LM is true");
}

}  // namespace accelerate::parallel
