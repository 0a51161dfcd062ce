#pragma once

/// The costs of sharded training by the ZeRO paper, to compare with the counts of a dry run (docs/dry_run.md).

#include <cstdint>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The closed formulas of the ZeRO paper (arXiv:1910.02054, sections 3.1, 5 and 7) for Adam, and the terms that our
/// engine adds to them. Bytes, on one rank.
struct ZeroEstimate {
  int64_t model_states = 0;  ///< after step(): parameters, gradients, moments
  int64_t gathered = 0;      ///< at most: whole parameters that are present at a time; the formulas leave them out
  int64_t volume = 0;        ///< of a step's collectives, as the paper counts: 2 or 3 times the parameters
  /// The part of it that is not needed because backward finds parameters still present, or needs no values of them.
  int64_t volume_saved = 0;
};

/// The numbers of a model that the formulas need, in elements.
struct ZeroShape {
  int64_t parameters = 0;
  int64_t largest_unit = 0;  ///< without the root
  int64_t root = 0;          ///< parameters of no other unit
  int64_t last_unit = 0;     ///< the unit that backward starts with
  int64_t num_processes = 1;
  int64_t master_bytes = 4;   ///< of a parameter in the shard, of its gradient there, and of each of Adam's two moments
  int64_t compute_bytes = 4;  ///< of a gathered parameter
  int64_t reduce_bytes = 4;   ///< of a gradient on the wire
};
/// Of a model, deferred or not, under a plugin's wrap policy and precision. @throws ConfigError as the wrap policy
/// does.
ACCELERATE_API ZeroShape zero_shape(const ModelRef& model, FullyShardedDataParallelPlugin plugin,
                                    int64_t num_processes);
/// @throws ConfigError for hybrid strategies.
ACCELERATE_API ZeroEstimate zero_estimate(ShardingStrategy strategy, const ZeroShape& shape);

}  // namespace accelerate
