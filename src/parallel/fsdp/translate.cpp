#include "parallel/fsdp/translate.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <variant>

#include "parallel/fsdp/wrap_policy.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

std::string size_text(const std::optional<int64_t>& size) { return size ? fmt::format("{}", *size) : "unset"; }

/// How many ranks hold a replica.
int64_t shard_size(const FullyShardedDataParallelPlugin& plugin, int64_t all, int64_t local) {
  const auto strategy = effective_strategy(plugin);
  const auto& replicas = plugin.dp_replicate_size;
  const auto& shards = plugin.dp_shard_size;
  if (strategy == ShardingStrategy::no_shard) {
    if (shards && *shards != 1)
      raise<ConfigError>(
          "FSDP: dp_shard_size is {}, but NO_SHARD leaves the model whole on each of the {} ranks; leave it out, or "
          "use HYBRID_SHARD",
          *shards, all);
    return 1;
  }
  if (strategy != ShardingStrategy::hybrid_shard && strategy != ShardingStrategy::hybrid_shard_zero2) {
    if (shards && *shards != all)
      raise<ConfigError>(
          "FSDP: dp_shard_size is {}, but {} splits the model over all {} ranks; leave it out, or use HYBRID_SHARD for "
          "replicas",
          *shards, to_string(strategy), all);
    return all;
  }
  if (!shards && !replicas) {
    if (local < 1 || all % local != 0)
      raise<ConfigError>(
          "FSDP: {} splits the model over the ranks of a machine, found {} (LOCAL_WORLD_SIZE) of {}, expected a "
          "divisor: all machines must have equally many. Set dp_shard_size to how many ranks should hold a replica",
          to_string(strategy), local, all);
    return local;
  }
  const int64_t size = shards ? *shards : all / *replicas;
  const int64_t count = replicas ? *replicas : all / size;
  if (size * count != all)
    raise<ConfigError>(
        "FSDP: found dp_replicate_size {} and dp_shard_size {}, expected two numbers of ranks whose product is the "
        "job's {}; give one of them, which must divide {}",
        size_text(replicas), size_text(shards), all, all);
  return size;
}

bool keeps_parameters(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::shard_grad_op || strategy == ShardingStrategy::hybrid_shard_zero2;
}

/// How units come and go. Source: fsdp.md, sections 1 and 2.
void set_policies(const FullyShardedDataParallelPlugin& plugin, ShardingSettings& settings) {
  using residency::Policy;
  const bool limited = plugin.limit_all_gathers;
  const auto ahead = [limited](int64_t units) { return limited ? units : Policy::kWholePass; };
  settings.forward = {.prefetch = ahead(plugin.forward_prefetch.value_or(false) ? 2 : 1),
                      .outstanding = limited ? 2 : std::numeric_limits<int64_t>::max() - 1,
                      .evict_after_use = !keeps_parameters(effective_strategy(plugin))};
  settings.backward = settings.forward;
  // Version 2 always fetches one unit ahead.
  const auto prefetch = plugin.fsdp_version == 2 ? BackwardPrefetch::backward_pre
                                                 : plugin.backward_prefetch.value_or(BackwardPrefetch::no_prefetch);
  settings.backward.prefetch = prefetch == BackwardPrefetch::backward_pre ? ahead(1) : 0;
  settings.prefetch_after_unit = prefetch == BackwardPrefetch::backward_post;
}

void set_precision(const FullyShardedDataParallelPlugin& plugin, ShardingSettings& settings) {
  if (!plugin.mixed_precision_policy) return;
  const MixedPrecision& precision = *plugin.mixed_precision_policy;
  settings.param_dtype = precision.param_dtype;
  settings.reduce_dtype = precision.reduce_dtype;
  if (precision.keep_low_precision_grads) settings.kept_gradients = KeptGradients::as_reduced;
  settings.buffer_dtype = precision.buffer_dtype;
  settings.output_dtype = precision.output_dtype;
  if (plugin.fsdp_version == 2 ? precision.cast_forward_inputs.value_or(true) : precision.cast_root_forward_inputs)
    settings.input_dtype = precision.param_dtype;
}

/// reshard_after_forward as a number.
int64_t near_of(const FullyShardedDataParallelPlugin& plugin, int64_t size) {
  const auto* near = plugin.reshard_after_forward ? std::get_if<int64_t>(&*plugin.reshard_after_forward) : nullptr;
  if (!near || *near <= 1) return 0;
  if (size % *near != 0)
    raise<ConfigError>(
        "FSDP: reshard_after_forward is {}, expected true, false or a divisor of the {} ranks that the model is "
        "split over",
        *near, size);
  return *near;
}

}  // namespace

std::vector<comm::AxisSize> axes_of(const FullyShardedDataParallelPlugin& plugin, int64_t ranks, int64_t local_ranks) {
  const int64_t size = shard_size(plugin, ranks, local_ranks);
  return {{comm::Axis::dp_replicate, ranks / size}, {comm::Axis::dp_shard, size}};
}

ShardingSettings settings_of(const FullyShardedDataParallelPlugin& plugin, int64_t ranks, int64_t local_ranks) {
  ShardingSettings settings;
  if (ranks > 1) {  // alone nothing is laid out
    settings.axes = axes_of(plugin, ranks, local_ranks);
    settings.near = near_of(plugin, settings.axes.back().size);
  }
  settings.units = [plugin](const ModelRef& model) {
    auto units = wrap_units(model, plugin);
    if (plugin.activation_checkpointing.value_or(false) &&
        std::all_of(units.begin(), units.end(), [](const auto& unit) { return unit.path.empty(); }))
      throw ConfigError(
          "FSDP: activation_checkpointing recomputes units in backward, but auto_wrap_policy makes none besides the "
          "root's, expected some; choose TRANSFORMER_BASED_WRAP or SIZE_BASED_WRAP");
    return units;
  };
  set_policies(plugin, settings);
  set_precision(plugin, settings);
  settings.quantized = {.weights = plugin.quantized_weights.value_or(false),
                        .gradients = plugin.quantized_gradients.value_or(false),
                        .frozen = plugin.quantized_nontrainable_weights.value_or(false)};
  const auto offload = plugin.cpu_offload.value_or(CPUOffload());
  settings.offload = offload.offload_params;
  settings.pin_memory = offload.pin_memory;
  if (plugin.offload_folder) {
    const DiskPlace place{.folder = *plugin.offload_folder};
    settings.states_on_disk = StatesOnDisk{.place = place,
                                           .reads_ahead = true,
                                           .writes_behind = true,
                                           .group_elements = std::numeric_limits<int64_t>::max(),
                                           .groups_in_memory = 3};
    settings.parameters_on_disk = ParametersOnDisk{.place = place};
  }
  settings.ignored_from_rank0 = plugin.cpu_ram_efficient_loading.value_or(false);
  // Models that are whole everywhere start as in data parallelism.
  settings.from_rank0 = settings.ignored_from_rank0 || plugin.sync_module_states.value_or(false) ||
                        effective_strategy(plugin) == ShardingStrategy::no_shard;
  settings.initialise = plugin.param_init_fn;
  settings.step_in_backward = plugin.step_in_backward.value_or(false);
  settings.step_at_once = plugin.step_at_once.value_or(false);
  return settings;
}

}  // namespace accelerate::parallel
