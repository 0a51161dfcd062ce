#pragma once

#include <cstdint>
#include <filesystem>

#include "run_state/run_state.hpp"

namespace accelerate::run_state {

struct RoomOptions {
  /// Hooks may write less than the models: then these count as nothing.
  bool models_as_they_are = true;
  bool is_first_on_its_disk = false;  ///< of UnfinishedCheckpoint
  bool one_disk = true;               ///< all ranks write to it
};

/// Compares what save() would write at least with what is free where the checkpoint's folder is, before a byte of it is
/// written. Counted are weights, and states of optimizers whose tensors are known; of ranks that write pieces, where
/// all write to one disk. Collective. @throws ResourceError with both numbers, on all ranks
void need_room(const RunState& run, const std::filesystem::path& folder, const SaveOptions& saving,
               const RoomOptions& options);

}  // namespace accelerate::run_state
