#pragma once

#include "utils/counts.hpp"

namespace accelerate::run_state {

/// Events of saving, and of giving states to the program; see utils/counts.hpp.
enum class CheckpointCount {
  checkpoints,
  automatic_checkpoints,  ///< that named themselves
  loader_positions,       ///< in them
  checkpoints_pruned,
  checkpoints_loaded,
  checkpoints_unchecked,  ///< of those: with checksums that nobody looked at
  parts_checked,          ///< of their files
  records_checked,        ///< of archives in them that have no list
  bytes_read,             ///< of their files, by this rank, those for checksums included
  checkpoints_on_signals,
  copies_on_nodes,  ///< checkpoints that a machine's first rank wrote besides rank 0
  layouts_made,     ///< of distributed checkpoints: others were those of earlier saves
  whole_states,     ///< of sharded models, for the program
  whole_optimizer_states,
  number_of_counts
};

}  // namespace accelerate::run_state
