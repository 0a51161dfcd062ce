#include "parallel/engines.hpp"

#include "comm/group.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {

std::vector<EngineKind>& engine_kinds() {
  static std::vector<EngineKind> kinds = {
      {"deepspeed", choose_deepspeed},      // refused
      {"megatron_lm", choose_megatron_lm},  // refused
      {"fsdp", choose_fsdp},
      {"ddp", choose_ddp},
  };
  return kinds;
}

std::optional<ParallelismConfig> requested_parallelism(const std::optional<ParallelismConfig>& given) {
  if (!given && !parallelism_config_requested()) return std::nullopt;
  return resolve(given.value_or(ParallelismConfig{}));
}

namespace {

void check_axes(const ParallelismConfig& config, const ChosenEngine& engine) {
  const auto check = [&](bool used, const char* axis, int64_t size, const char* what) {
    if (used && !engine.splits(axis))
      raise<ConfigError>(
          "Accelerator: the parallelism configuration has {}_size {}, but {} parallelism is not in this version, "
          "expected 1; dp_replicate_size and dp_shard_size are here, and dp_shard_size also makes room for a model "
          "that is too large for one rank",
          axis, size, what);
  };
  check(config.tp_enabled(), "tp", *config.tp_size, "tensor");
  check(config.cp_enabled(), "cp", *config.cp_size, "context");
  check(config.sp_enabled(), "sp", *config.sp_size, "sequence");
}

}  // namespace

std::vector<comm::AxisSize> ChosenEngine::axes(const std::optional<ParallelismConfig>& config,
                                               const comm::Group& all) const {
  using comm::Axis;
  const auto sizes = config.value_or(ParallelismConfig{});
  // What the axes leave over (under DeepSpeed they need not name all ranks) reads other samples.
  const int64_t rest = all.world_size() / sizes.total_size();
  return {{Axis::dp_replicate, sizes.dp_replicate_size.value_or(1) * rest},
          {Axis::dp_shard, sizes.dp_shard_size.value_or(1)},
          {Axis::cp, sizes.cp_size.value_or(1)},
          {Axis::sp, sizes.sp_size.value_or(1)},
          {Axis::tp, sizes.tp_size.value_or(1)}};
}

std::unique_ptr<ChosenEngine> choose_engine(const EngineRequest& request) {
  for (const auto& kind : engine_kinds())
    if (auto chosen = kind.choose(request)) {
      if (request.parallelism) check_axes(*request.parallelism, *chosen);
      return chosen;
    }
  throw InternalError("Accelerator: no engine takes this run, expected the last of engine_kinds() to");
}

}  // namespace accelerate::parallel
