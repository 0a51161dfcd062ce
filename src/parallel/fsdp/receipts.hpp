#pragma once

#include <optional>
#include <vector>

#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/parallel/parallelism_config.hpp"
#include "observe/receipt_rows.hpp"

namespace accelerate::receipts {

struct ShardedFacts {
  RunFacts run = {};
  FullyShardedDataParallelPlugin given = {};
  ParallelismConfig parallelism = {};  ///< given
  /// Resolved; nothing: models are not sharded.
  std::optional<FullyShardedDataParallelPlugin> sharding = {};
  int64_t checkpoints = 0, whole_states = 0, whole_optimizer_states = 0;  ///< that were saved, and given to the program
};
std::vector<Receipt> of_sharding(const ShardedFacts& facts);

}  // namespace accelerate::receipts
