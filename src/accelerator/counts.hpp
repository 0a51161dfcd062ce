#pragma once

#include "utils/counts.hpp"

namespace accelerate {

/// Events in accumulate() and backward(); see utils/counts.hpp.
enum class TrainingCount {
  micro_steps,
  synchronised_steps,
  early_synchronisations,  ///< in the middle of a group (sync_each_batch)
  loader_end_synchronisations,
  loader_ends_passed,  ///< in the middle of a group, without a synchronisation
  number_of_counts
};

}  // namespace accelerate
