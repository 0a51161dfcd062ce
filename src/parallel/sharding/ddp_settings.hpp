#pragma once

#include "accelerate/utils/kwargs.hpp"

namespace accelerate::parallel {

/// What data parallelism does by its buckets and its graph. The other settings hold for sharded models anyway: unused
/// parameters are found, gradients are views, buffers are not sent before forwards.
/// @param engine  for people @throws ConfigError
void refuse_settings_of_ddp(const DistributedDataParallelKwargs& kwargs, const char* engine);

}  // namespace accelerate::parallel
