#include "accelerate/parallel/ddp.hpp"
#include "accelerate/parallel/fsdp.hpp"
#include "parallel/engines.hpp"
#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

/// The resolved plugin, if sharding is asked for; its groups of ranks are those of the parallelism configuration.
std::optional<FullyShardedDataParallelPlugin> requested_sharding(const EngineRequest& request) {
  const bool asked = request.fsdp || fsdp_requested();
  const auto& parallelism = request.parallelism;
  if (!asked && !(parallelism && parallelism->dp_shard_enabled())) return std::nullopt;
  auto plugin = request.fsdp.value_or(FullyShardedDataParallelPlugin{});
  if (!parallelism) return resolve(std::move(plugin));
  if (!asked) plugin.fsdp_version = 2;
  // Version 1 has no mesh: validate() refuses it.
  if (plugin.fsdp_version.value_or(environment::integer({"FSDP_VERSION"}).value_or(1)) == 2) {
    const auto from_config = [](std::optional<int64_t>& ranks, const std::optional<int64_t>& size, const char* name) {
      if (ranks && *ranks != *size)
        raise<ConfigError>("Accelerator: fsdp_plugin.{} is {}, but parallelism_config.{} is {}; give one of them", name,
                           *ranks, name, *size);
      ranks = size;
    };
    // A configuration without any axis says nothing about sharding; only the environment must not say it instead.
    if (parallelism->total_size() == 1) {
      if (!plugin.dp_replicate_size && !plugin.dp_shard_size) plugin.dp_replicate_size = 1;
      return resolve(std::move(plugin));
    }
    const bool replicas = parallelism->dp_replicate_enabled() && parallelism->dp_shard_enabled();
    if (replicas || plugin.dp_shard_size)
      from_config(plugin.dp_shard_size, parallelism->dp_shard_size, "dp_shard_size");
    from_config(plugin.dp_replicate_size, parallelism->dp_replicate_size, "dp_replicate_size");
  }
  return resolve(std::move(plugin));
}

/// With NO_SHARD models are averaged whole, and only files and names are those of sharded runs.
class Sharding final : public ChosenEngine {
 public:
  Sharding(FullyShardedDataParallelPlugin plugin, std::unique_ptr<ChosenEngine> whole)
      : plugin_(std::move(plugin)), whole_(std::move(whole)) {}

  std::optional<DistributedType> distributed_type() const override { return DistributedType::FSDP; }
  std::optional<StateDictType> state_dict_type() const override { return plugin_.state_dict_type; }
  JobFacts job(int64_t num_processes) const override {
    return {.num_processes = num_processes, .is_fsdp2 = plugin_.fsdp_version == 2};
  }
  void set_precision(PrecisionType precision) override {
    if (!plugin_.mixed_precision_policy && precision != PrecisionType::NO)
      plugin_.mixed_precision_policy = mixed_precision_policy(to_string(precision), *plugin_.fsdp_version);
  }
  void check(const ModelRef&) const override {
    if (!shards() && plugin_.activation_checkpointing.value_or(false))
      throw ConfigError(
          "prepare: activation_checkpointing recomputes the units of sharded models, but the sharding strategy is "
          "NO_SHARD, expected another one; HYBRID_SHARD with dp_shard_size 1 keeps whole models on all ranks and has "
          "units");
  }
  bool places_models() const override { return shards(); }

  std::shared_ptr<Engine> make(const ModelRef& model, const at::Device& device, bool evaluation_mode) const override {
    // Also in evaluation mode: a teacher that is never trained may be too large to be whole everywhere.
    if (shards()) return std::make_shared<FullyShardedDataParallel>(model, device, plugin_);
    return whole_->make(model, device, evaluation_mode);
  }

 private:
  bool shards() const { return effective_strategy(plugin_) != ShardingStrategy::no_shard; }

  FullyShardedDataParallelPlugin plugin_;
  std::unique_ptr<ChosenEngine> whole_;
};

}  // namespace

std::unique_ptr<ChosenEngine> choose_fsdp(const EngineRequest& request) {
  auto plugin = requested_sharding(request);
  if (!plugin) return nullptr;
  return std::make_unique<Sharding>(std::move(*plugin), choose_ddp(request));
}

}  // namespace accelerate::parallel
