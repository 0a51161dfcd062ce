#pragma once

#include <filesystem>
#include <functional>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "run_state/run_state.hpp"

/// Buffers that differ from rank to rank: a model's file has rank 0's, and each rank's buffers_<rank>.bin its own,
/// where any rank has others.
namespace accelerate::run_state {

/// Collective. @throws CheckpointError, ResourceError, on all ranks.
void save_own_buffers(const RunState& run, const std::filesystem::path& folder);

/// Reads this rank's file and looks whether it fits; nothing changes. Where another number of ranks saved it all keep
/// rank 0's. Not collective. @param models  those that are loaded
/// @return what takes them up, after the models have been loaded. @throws CheckpointError.
std::vector<std::function<void()>> stage_own_buffers(const RunState& run, const std::vector<ModelRef>& models,
                                                     const std::filesystem::path& folder, bool strict);

}  // namespace accelerate::run_state
