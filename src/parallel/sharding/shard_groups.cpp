#include "parallel/sharding/shard_groups.hpp"

#include <ATen/ops/full.h>

#include "comm/group.hpp"

namespace accelerate::parallel {
namespace {

/// How many neighbours share a machine, the same number everywhere; all of them where that can't be said. Collective.
int64_t ranks_of_machine(comm::Group& group) {
  const int64_t mine = group.local_world_size(), all = group.world_size();
  const auto everywhere = group.all_gather(
      at::full({1}, mine, at::TensorOptions().dtype(at::kLong).device(group.device())), "comparing sizes of machines");
  return mine < all && all % mine == 0 && everywhere.eq(mine).all().item<bool>() ? mine : all;
}

}  // namespace

int64_t ShardGroups::rank() const { return shard ? shard->rank() : 0; }
int64_t ShardGroups::ranks() const { return shard ? shard->world_size() : 1; }
int64_t ShardGroups::replica() const { return replicate ? replicate->rank() : 0; }

ShardGroups make_shard_groups(const std::vector<comm::AxisSize>& axes, int64_t near,
                              const std::shared_ptr<comm::Group>& all, bool by_machine) {
  ShardGroups groups;
  if (!all) return groups;
  // A mesh of its own: a second Accelerator's models may be laid out otherwise than the job's.
  const comm::Mesh& mesh = groups.mesh = {all, axes};
  const int64_t size = mesh.size({comm::Axis::dp_shard});
  groups.shard = size > 1 ? mesh.along({comm::Axis::dp_shard}) : all->split("shard", [](int64_t rank) { return rank; });
  if (mesh.size({comm::Axis::dp_replicate}) > 1) groups.replicate = mesh.along({comm::Axis::dp_replicate});
  if (near > 1 && near < size) groups.near = groups.shard->split("near", [near](int64_t rank) { return rank / near; });
  if (by_machine && size > 1) {
    const int64_t ranks = ranks_of_machine(*groups.shard);
    if (ranks == 1 || ranks == size) return groups;
    groups.machine = groups.shard->split("machine", [ranks](int64_t rank) { return rank / ranks; });
    groups.across = groups.shard->split("across machines", [ranks](int64_t rank) { return rank % ranks; });
  }
  return groups;
}

}  // namespace accelerate::parallel
