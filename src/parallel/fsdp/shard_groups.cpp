#include "parallel/fsdp/shard_groups.hpp"

#include <string>

#include "comm/group.hpp"
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

}  // namespace

int64_t ShardGroups::rank() const { return shard ? shard->rank() : 0; }
int64_t ShardGroups::ranks() const { return shard ? shard->world_size() : 1; }
int64_t ShardGroups::replica() const { return replicate ? replicate->rank() : 0; }

std::vector<comm::AxisSize> axes_of(const FullyShardedDataParallelPlugin& plugin, int64_t ranks, int64_t local_ranks) {
  const int64_t size = shard_size(plugin, ranks, local_ranks);
  return {{comm::Axis::dp_replicate, ranks / size}, {comm::Axis::dp_shard, size}};
}

ShardGroups make_shard_groups(const FullyShardedDataParallelPlugin& plugin, const std::shared_ptr<comm::Group>& all) {
  ShardGroups groups;
  if (!all) return groups;
  // Of its own: a second Accelerator's models may be laid out otherwise than the job's.
  const comm::Mesh& mesh = groups.mesh = {all, axes_of(plugin, all->world_size(), all->local_world_size())};
  const int64_t size = mesh.size({comm::Axis::dp_shard});
  groups.shard = size > 1 ? mesh.along({comm::Axis::dp_shard}) : all->split("shard", [](int64_t rank) { return rank; });
  if (mesh.size({comm::Axis::dp_replicate}) > 1) groups.replicate = mesh.along({comm::Axis::dp_replicate});
  const auto* near = plugin.reshard_after_forward ? std::get_if<int64_t>(&*plugin.reshard_after_forward) : nullptr;
  if (near && *near > 1) {
    if (size % *near != 0)
      raise<ConfigError>(
          "FSDP: reshard_after_forward is {}, expected true, false or a divisor of the {} ranks that the model is "
          "split over",
          *near, size);
    if (*near < size)
      groups.near = groups.shard->split("reshard_after_forward", [near](int64_t rank) { return rank / *near; });
  }
  return groups;
}

}  // namespace accelerate::parallel
