#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "run_state/run_state.hpp"

/// The state that each rank has for itself: own_states_<rank>.bin has it, by names, where there is anything. The errors
/// that compression of gradients has left are such states, and models that train apart (LocalSGD).
namespace accelerate::run_state {

/// Writes this rank's file, if there is anything. Not collective.
void save_own_states(const RunState& run, const std::filesystem::path& folder);

/// Reads this rank's file and looks whether it fits; nothing changes. Not collective.
/// @return what takes the states up, after models and optimizers have been loaded.
/// @throws CheckpointError, also where another number of ranks saved it.
std::vector<std::function<void()>> stage_own_states(const RunState& run, const std::filesystem::path& folder);

}  // namespace accelerate::run_state
