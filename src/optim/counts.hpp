#pragma once

#include "utils/counts.hpp"

namespace accelerate::optim {

/// Events in step() of optimizers and schedules; see utils/counts.hpp.
enum class OptimCount {
  optimizer_steps,
  steps_skipped,     ///< because gradients overflowed
  steps_ahead,       ///< parameters whose new values were computed within backward
  steps_taken_over,  ///< of them, by step()
  ahead_bytes,       ///< of memory for them
  steps_at_once,     ///< parameters that were stepped on within backward
  schedule_steps,
  schedule_steps_alone,  ///< without asking the optimizers
  schedule_counts,       ///< micro-steps that only counted
  number_of_counts
};

}  // namespace accelerate::optim
