#pragma once

#include "utils/counts.hpp"

namespace accelerate::parallel {

/// Events of sharded models; see utils/counts.hpp.
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
  parts_as_fp8,   ///< whose parameters travel so
  parts_as_int8,  ///< likewise
  parts_as_int4,  ///< whose gradients do
  parts_coded,    ///< frozen ones that are kept so
  forwards_sharded,
  gradients_reduced,  ///< parts, over ranks
  gradient_elements,  ///< in them
  gradient_wire_bytes,
  low_precision_gradients,  ///< given to optimizers as they were reduced
  parts_offloaded,
  parts_pinned,
  parts_on_disk,          ///< whose shards units are gathered from lie on a disk
  groups_from_disk,       ///< stepped on, what optimizers keep of them having come from one
  groups_read_ahead,      ///< of these, and of groups_ahead, under way before they were needed
  groups_written_behind,  ///< of these, on their way back when the step on them was over
  groups_ahead,           ///< stepped on within backward: what is kept of them has come from a disk, and new values go
  groups_taken_over,      ///< of these, by a step that has read and written none of it
  gradients_to_disk,      ///< parts' gradients of a backward that went to one
  replica_gradients,
  number_of_counts
};

}  // namespace accelerate::parallel
