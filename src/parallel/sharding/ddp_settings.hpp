#pragma once

#include "accelerate/utils/kwargs.hpp"

namespace accelerate::parallel {

/// For people: which settings of an engine do what those of data parallelism do there.
struct InsteadOfDdp {
  const char* engine;  ///< "FSDP"
  const char* sizes;   ///< "auto_wrap_policy and min_num_params decide how large they are"
  const char* types;   ///< "mixed_precision_policy.reduce_dtype says how gradients travel"
};

/// Refuses settings about the buckets and the graph of data parallelism. The other settings hold for sharded models
/// anyway: unused parameters are found, gradients are views, buffers are not sent before forwards. @throws ConfigError
void refuse_settings_of_ddp(const DistributedDataParallelKwargs& kwargs, const InsteadOfDdp& instead);

}  // namespace accelerate::parallel
