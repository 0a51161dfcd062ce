#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "run_state/run_state.hpp"

/// The memory of fp8 for each model, scales and largest values: fp8_states.bin, where there is anything. It is the same
/// on all ranks, so that one writes it and any number of ranks reads it.
namespace accelerate::run_state {

/// Not collective.
void save_fp8_states(const RunState& run, const std::filesystem::path& folder);

/// The states that the prepared models are to take up, as far as there are any; warns where a model has one and the
/// checkpoint has none. Not collective.
/// @throws CheckpointError if the file is damaged, or another recipe wrote it.
std::vector<std::pair<FP8Training*, std::map<std::string, at::Tensor>>> read_fp8_states(
    const RunState& run, const std::filesystem::path& folder);

}  // namespace accelerate::run_state
