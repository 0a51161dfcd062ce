#include "parallel/fsdp/mesh.hpp"

#include <string>

#include "accelerate/utils/error.hpp"
#include "comm/group.hpp"

namespace accelerate::parallel {
namespace {

/// How many ranks hold a replica.
int64_t shard_size(const FullyShardedDataParallelPlugin& plugin, const comm::Group& world) {
  const auto strategy = effective_strategy(plugin);
  const int64_t all = world.world_size();
  const auto text = [](int64_t number) { return std::to_string(number); };
  const auto& replicas = plugin.dp_replicate_size;
  const auto& shards = plugin.dp_shard_size;
  if (strategy != ShardingStrategy::hybrid_shard && strategy != ShardingStrategy::hybrid_shard_zero2) {
    if (shards && *shards != all)
      throw ConfigError("FSDP: dp_shard_size is " + text(*shards) + ", but " + to_string(strategy) +
                        " splits the model over all " + text(all) +
                        " ranks; leave it out, or use HYBRID_SHARD for replicas");
    return all;
  }
  if (!shards && !replicas) {
    const int64_t local = world.local_world_size();
    if (local < 1 || all % local != 0)
      throw ConfigError("FSDP: " + to_string(strategy) + " splits the model over the ranks of a machine, found " +
                        text(local) + " (LOCAL_WORLD_SIZE) of " + text(all) +
                        ", expected a divisor: all machines must have equally many. Set dp_shard_size to how many "
                        "ranks should hold a replica");
    return local;
  }
  const int64_t size = shards ? *shards : all / *replicas;
  const int64_t count = replicas ? *replicas : all / size;
  if (size * count != all)
    throw ConfigError("FSDP: found dp_replicate_size " + (replicas ? text(*replicas) : "unset") +
                      " and dp_shard_size " + (shards ? text(*shards) : "unset") +
                      ", expected two numbers of ranks whose product is the job's " + text(all) +
                      "; give one of them, which must divide " + text(all));
  return size;
}

}  // namespace

int64_t Mesh::rank() const { return shard ? shard->rank() : 0; }
int64_t Mesh::ranks() const { return shard ? shard->world_size() : 1; }
int64_t Mesh::replica() const { return replicate ? replicate->rank() : 0; }

Mesh make_mesh(const FullyShardedDataParallelPlugin& plugin, const std::shared_ptr<comm::Group>& world) {
  Mesh mesh;
  if (!world) return mesh;
  const int64_t size = shard_size(plugin, *world);
  mesh.shard = world;
  if (size < world->world_size()) {
    mesh.shard = world->split("shard", [size](int64_t rank) { return rank / size; });
    mesh.replicate = world->split("replicate", [size](int64_t rank) { return rank % size; });
  }
  const auto* near = plugin.reshard_after_forward ? std::get_if<int64_t>(&*plugin.reshard_after_forward) : nullptr;
  if (near && *near > 1) {
    if (size % *near != 0)
      throw ConfigError("FSDP: reshard_after_forward is " + std::to_string(*near) +
                        ", expected true, false or a divisor of the " + std::to_string(size) +
                        " ranks that the model is split over");
    if (*near < size)
      mesh.near = mesh.shard->split("reshard_after_forward", [near](int64_t rank) { return rank / *near; });
  }
  return mesh;
}

}  // namespace accelerate::parallel
