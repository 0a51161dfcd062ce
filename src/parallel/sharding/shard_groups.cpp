#include "parallel/sharding/shard_groups.hpp"

#include "comm/group.hpp"

namespace accelerate::parallel {

int64_t ShardGroups::rank() const { return shard ? shard->rank() : 0; }
int64_t ShardGroups::ranks() const { return shard ? shard->world_size() : 1; }
int64_t ShardGroups::replica() const { return replicate ? replicate->rank() : 0; }

ShardGroups make_shard_groups(const std::vector<comm::AxisSize>& axes, int64_t near,
                              const std::shared_ptr<comm::Group>& all) {
  ShardGroups groups;
  if (!all) return groups;
  // Of its own: a second Accelerator's models may be laid out otherwise than the job's.
  const comm::Mesh& mesh = groups.mesh = {all, axes};
  const int64_t size = mesh.size({comm::Axis::dp_shard});
  groups.shard = size > 1 ? mesh.along({comm::Axis::dp_shard}) : all->split("shard", [](int64_t rank) { return rank; });
  if (mesh.size({comm::Axis::dp_replicate}) > 1) groups.replicate = mesh.along({comm::Axis::dp_replicate});
  if (near > 1 && near < size) groups.near = groups.shard->split("near", [near](int64_t rank) { return rank / near; });
  return groups;
}

}  // namespace accelerate::parallel
