#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "accelerate/parallel/fsdp_plugin.hpp"
#include "comm/mesh.hpp"

namespace accelerate::parallel {

/// Which ranks hold which pieces of a model. With the hybrid strategies rank r is number r % S among the S ranks that
/// hold one replica, the (r / S)-th.
struct ShardGroups {
  comm::Mesh mesh;                         ///< their axes
  std::shared_ptr<comm::Group> shard;      ///< who holds one replica together; null alone
  std::shared_ptr<comm::Group> replicate;  ///< who holds the same pieces; null where there is one replica
  std::shared_ptr<comm::Group> near;       ///< who keeps parameters together between forward and backward
                                           ///< (reshard_after_forward as a number); null: as `shard`

  int64_t rank() const;
  int64_t ranks() const;
  int64_t replica() const;
};

/// How a model is laid out over so many ranks, `local_ranks` of them on each machine. @throws ConfigError when the
/// plugin's numbers of ranks don't fit together, with all of them.
std::vector<comm::AxisSize> axes_of(const FullyShardedDataParallelPlugin& plugin, int64_t ranks, int64_t local_ranks);

/// Collective over `all`, which is null alone. @throws ConfigError as axes_of().
ShardGroups make_shard_groups(const FullyShardedDataParallelPlugin& plugin, const std::shared_ptr<comm::Group>& all);

}  // namespace accelerate::parallel
