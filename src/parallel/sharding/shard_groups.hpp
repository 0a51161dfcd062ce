#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/mesh.hpp"

namespace accelerate::parallel {

/// Which ranks hold which shards of a model. With the hybrid strategies rank r is number r % S among the S ranks that
/// hold one replica, the (r / S)-th.
struct ShardGroups {
  comm::Mesh mesh;                         ///< their axes
  std::shared_ptr<comm::Group> shard;      ///< ranks that hold one replica together; null alone
  std::shared_ptr<comm::Group> replicate;  ///< ranks that hold the same shards; null where there is one replica
  std::shared_ptr<comm::Group> near;       ///< those that keep parameters from forward to backward; null: as
                                           ///< `shard`
  /// Ranks of `shard`: those on this rank's machine, and those with its place on each machine. Null where nobody
  /// asked, and where one of the two would be everybody.
  std::shared_ptr<comm::Group> machine, across;

  int64_t rank() const;
  int64_t ranks() const;
  int64_t replica() const;
};

/// Collective over `all`, which is null alone. @param axes  of dp_replicate and dp_shard
/// @param near        see ShardingSettings
/// @param by_machine  whether `machine` and `across` are wanted
ShardGroups make_shard_groups(const std::vector<comm::AxisSize>& axes, int64_t near,
                              const std::shared_ptr<comm::Group>& all, bool by_machine);

}  // namespace accelerate::parallel
