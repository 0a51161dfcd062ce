#pragma once

#include "utils/counts.hpp"

namespace accelerate::snapshot {

/// Events of saves behind training; see utils/counts.hpp.
enum class SnapshotCount {
  marks,
  mark_ns,       ///< from the call of save_state to its return
  state_bytes,   ///< that are written later from where they lie
  copied_bytes,  ///< at marks: all else
  kept_bytes,    ///< that were rewritten before they had been written
  waits,         ///< of who rewrites for who reads the same chunk
  waited_ns,     ///< in them, and in calls that wait for a checkpoint
  failures,
  number_of_counts
};

}  // namespace accelerate::snapshot
