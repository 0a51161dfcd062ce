#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "parallel/engines.hpp"
#include "parallel/fsdp/translate.hpp"
#include "parallel/gradient_hook.hpp"
#include "parallel/recompute/recompute.hpp"
#include "parallel/sharding/ddp_settings.hpp"
#include "parallel/sharding/sharding.hpp"
#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

/// The resolved plugin, if sharding is asked for; its groups of ranks are those of the parallelism configuration.
std::optional<FullyShardedDataParallelPlugin> resolve_sharding(const EngineRequest& request) {
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

/// The same for all who ask: what resolving warns of is said once.
const std::optional<FullyShardedDataParallelPlugin>& requested_sharding(const EngineRequest& request) {
  if (!request.sharding)
    request.sharding = std::make_shared<const std::optional<FullyShardedDataParallelPlugin>>(resolve_sharding(request));
  return *request.sharding;
}

class ChosenFsdp final : public ChosenLayer {
 public:
  ChosenFsdp(FullyShardedDataParallelPlugin plugin, int64_t compare_parameters_every)
      : plugin_(std::move(plugin)), compare_parameters_every_(compare_parameters_every) {}

  bool joins_data() const override { return true; }
  std::optional<DistributedType> distributed_type() const override { return DistributedType::FSDP; }
  std::optional<StateDictType> state_dict_type() const override { return plugin_.state_dict_type; }
  StateDictConfig state_dict_config() const override { return of_whole_state(plugin_.state_dict_config); }
  StateDictConfig optim_state_dict_config() const override { return of_whole_state(plugin_.optim_state_dict_config); }
  const FullyShardedDataParallelPlugin* sharding() const override { return &plugin_; }
  JobFacts job(int64_t num_processes) const override {
    return {.num_processes = num_processes, .is_fsdp2 = plugin_.fsdp_version == 2};
  }
  std::vector<comm::AxisSize> axes(const comm::Group& all) const override {
    return axes_of(plugin_, all.world_size(), all.local_world_size());
  }
  void set_precision(PrecisionType precision) override {
    if (plugin_.mixed_precision_policy || precision == PrecisionType::NO) return;
    plugin_.mixed_precision_policy = mixed_precision_policy(to_string(precision), *plugin_.fsdp_version);
    // Results come back as fp32, sharded or not, unless the program itself asks for another type.
    plugin_.mixed_precision_policy->output_dtype.reset();
  }
  void gather_in_fp8(const std::vector<std::string>& weights) override {
    if (plugin_.quantized_weights.value_or(false) && !weights.empty())
      raise<ConfigError>(
          "prepare: found fsdp_plugin.quantized_weights and AORecipeKwargs::enable_fsdp_float8_all_gather, expected "
          "one of them: both say how '{}' travels; set one to false",
          weights.front());
    fp8_weights_ = weights;
  }
  bool places_models() const override { return true; }

  /// Also in evaluation mode: a teacher that is never trained may be too large to be whole everywhere.
  std::unique_ptr<Layer> make(const ModelRef& model, const at::Device& device, bool,
                              const std::vector<Held>& given) const override {
    const auto group = comm::mesh().along(comm::kTokens);
    auto settings = settings_of(plugin_, group ? group->world_size() : 1, group ? group->local_world_size() : 1);
    settings.fp8_weights = {fp8_weights_.begin(), fp8_weights_.end()};
    settings.compare_parameters_every = compare_parameters_every_;
    return std::make_unique<Sharding>(model, device, std::move(settings), given);
  }

 private:
  /// With the other types the settings are about shards, and a whole state goes to rank 0.
  StateDictConfig of_whole_state(const std::optional<StateDictConfig>& config) const {
    return plugin_.state_dict_type == StateDictType::full_state_dict ? *config : StateDictConfig{.rank0_only = true};
  }

  FullyShardedDataParallelPlugin plugin_;
  int64_t compare_parameters_every_;
  std::vector<std::string> fp8_weights_;  ///< of the next model
};

/// Recomputing the units that sharding makes, which the plugin asks for, too.
class ChosenRecompute final : public ChosenLayer {
 public:
  explicit ChosenRecompute(const residency::UnitCheckpointOptions& options) : options_(options) {}
  std::unique_ptr<Layer> make(const ModelRef&, const at::Device&, bool, const std::vector<Held>& given) const override {
    return std::make_unique<Recompute>(given, options_);
  }

 private:
  residency::UnitCheckpointOptions options_;
};

}  // namespace

std::unique_ptr<ChosenLayer> choose_fsdp(const EngineRequest& request) {
  const auto& plugin = requested_sharding(request);
  if (!plugin) return nullptr;
  check_hook_settings(request.ddp);
  refuse_settings_of_ddp(request.ddp, {.engine = "FSDP",
                                       .sizes = "auto_wrap_policy and min_num_params decide how large they are",
                                       .types = "mixed_precision_policy.reduce_dtype says how gradients travel"});
  return std::make_unique<ChosenFsdp>(*plugin, request.ddp.compare_parameters_every);
}

std::unique_ptr<ChosenLayer> choose_recompute(const EngineRequest& request) {
  const auto& plugin = requested_sharding(request);
  if (!plugin || !plugin->activation_checkpointing.value_or(false)) return nullptr;
  return std::make_unique<ChosenRecompute>(
      residency::UnitCheckpointOptions{.offload = plugin->activation_checkpointing_offload.value_or(false)});
}

}  // namespace accelerate::parallel
