#pragma once

#include <cstdint>
#include <vector>

#include "accelerate/parallel/fsdp_plugin.hpp"
#include "comm/mesh.hpp"
#include "parallel/sharding/settings.hpp"

namespace accelerate::parallel {

/// How a model is laid out over so many ranks, `local_ranks` of them on each machine. @throws ConfigError when the
/// plugin's numbers of ranks don't fit together, with all of them.
std::vector<comm::AxisSize> axes_of(const FullyShardedDataParallelPlugin& plugin, int64_t ranks, int64_t local_ranks);

/// The settings of a resolved plugin for the engine that shards. @throws ConfigError as axes_of(), and for other
/// numbers in reshard_after_forward than divisors of the ranks that hold a replica.
ShardingSettings settings_of(const FullyShardedDataParallelPlugin& plugin, int64_t ranks, int64_t local_ranks);

}  // namespace accelerate::parallel
