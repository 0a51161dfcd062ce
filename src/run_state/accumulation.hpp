#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/utils/nested.hpp"
#include "run_state/run_state.hpp"

/// Checkpoints in the middle of an accumulation group: gradients_<rank>.bin has what the group's micro-steps have left
/// on that rank so far. Without that a run that goes on would take its next step with a part of the gradients.
namespace accelerate::run_state {

/// How far a group is.
struct GroupPosition {
  int64_t step = 0;           ///< micro-steps that are done; 0: none, and there is no file
  int64_t num_steps = 1;      ///< of a group
  int64_t num_processes = 1;  ///< that accumulated
  bool operator==(const GroupPosition&) const = default;
  ACCELERATE_FIELDS(step, num_steps, num_processes)
};

/// Writes this rank's file if the group is unfinished. Not collective.
void save_accumulation(const RunState& run, const std::filesystem::path& folder, const SaveOptions& options);

/// The accumulation in the files, for this number of ranks and this length of groups.
class StagedAccumulation {
 public:
  /// Reads this rank's file, or, for another number of ranks, all: then each rank gets the average, so that the sum
  /// over ranks stays what it was. Not collective.
  /// @throws CheckpointError with both sides' numbers, where the group can't go on.
  StagedAccumulation(const RunState& run, const std::filesystem::path& folder, const RunLoadOptions& options);
  /// Whether all ranks have read the same. Collective. @throws CheckpointError on all ranks.
  void agree() const;
  /// Gives the parameters these gradients, and none where there are none.
  /// @param step  what to go on from without a file, the same on all ranks
  void apply(RunState& run, int64_t step) const;

 private:
  GroupPosition position_;
  int64_t step_ = 0;  ///< in this run's micro-steps
  double num_items_ = 0;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;  ///< by what holds them; undefined: none
};

}  // namespace accelerate::run_state
