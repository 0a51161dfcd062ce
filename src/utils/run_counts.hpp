#pragma once

#include "utils/counts.hpp"

namespace accelerate {

/// Events that the launcher's monitor is told of (observe/step_report.hpp), and moves of tensors
/// (accelerate/utils/ops.hpp); see utils/counts.hpp.
enum class RunCount {
  backwards,
  items,             ///< that losses were the mean of
  tensors_moved,     ///< from batches to the device
  tensors_in_place,  ///< that lay there already
  // waiting of the training thread (observe/wait_clock.hpp); collectives on a GPU's streams don't block it
  comm_wait_ns,
  data_wait_ns,
  number_of_counts
};

}  // namespace accelerate
