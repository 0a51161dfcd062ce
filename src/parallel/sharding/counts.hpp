#pragma once

#include "utils/counts.hpp"

namespace accelerate::parallel {

/// What happened to sharded models; see utils/counts.hpp.
enum class ShardingCount {
  units,
  units_shared,  ///< in memory that all ranks see
  elements_sharded,
  elements_converted,  ///< from the dtype in which they are kept to that of the computation
  elements_held,       ///< of them, here
  parameters_ignored,
  modules_initialised,
  tensors_from_rank0,
  bytes_from_rank0,
  buffers_converted,
  full_precision_units,
  parts_as_fp8,  ///< whose parameters travel so
  forwards_sharded,
  gradients_reduced,  ///< parts, over ranks
  gradient_elements,  ///< in them
  gradient_wire_bytes,
  low_precision_gradients,  ///< given to optimizers as they were reduced
  parts_offloaded,
  parts_pinned,
  replica_gradients,
  number_of_counts
};

}  // namespace accelerate::parallel
