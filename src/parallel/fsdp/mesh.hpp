#pragma once

#include <cstdint>
#include <memory>

#include "accelerate/parallel/fsdp_plugin.hpp"

namespace accelerate::comm {
class Group;
}

namespace accelerate::parallel {

/// Which ranks hold which pieces of a model. With the hybrid strategies rank r is number r % S among the S ranks that
/// hold one replica, the (r / S)-th.
struct Mesh {
  std::shared_ptr<comm::Group> shard;      ///< who holds one replica together; null alone
  std::shared_ptr<comm::Group> replicate;  ///< who holds the same pieces; null where there is one replica
  std::shared_ptr<comm::Group> near;       ///< who keeps parameters together between forward and backward
                                           ///< (reshard_after_forward as a number); null: as `shard`

  int64_t rank() const;
  int64_t ranks() const;
  int64_t replica() const;
};

/// Collective over `world`, which is null alone. @throws ConfigError when the plugin's numbers of ranks don't fit
/// together, with all of them.
Mesh make_mesh(const FullyShardedDataParallelPlugin& plugin, const std::shared_ptr<comm::Group>& world);

}  // namespace accelerate::parallel
