#pragma once

#include "accelerate/accelerator.hpp"

/// Which engine a program's options, and the environment that the launcher made, ask for.
namespace accelerate {

/// @throws ConfigError when they ask for one that is not here, naming what comes nearest. Rank 0 warns of a compiler
/// that is not here, without which all works.
void refuse_missing_engines(const AcceleratorOptions& options);

/// The resolved parallelism configuration, if there is one. @throws ConfigError for axes that nothing here can split.
std::optional<ParallelismConfig> requested_parallelism(const AcceleratorOptions& options);

/// The resolved plugin for sharded training, if it is asked for; its groups of ranks are those of `parallelism`.
std::optional<FullyShardedDataParallelPlugin> requested_sharding(const AcceleratorOptions& options,
                                                                 const std::optional<ParallelismConfig>& parallelism);

}  // namespace accelerate
