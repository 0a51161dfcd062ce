#pragma once

#include <ATen/core/ivalue.h>

#include <filesystem>
#include <vector>

#include "run_state/holdings.hpp"

/// Each rank's shards as they are, which make sense only to the same rank of as many, of a model that is cut in the
/// same way.
namespace accelerate::run_state {

c10::IValue own_pieces(const std::vector<parallel::Held>& holdings, const c10::IValue& state);
/// The `state` again. @throws CheckpointError when the file is another rank's, or a model's that is cut differently.
c10::IValue load_own_pieces(const std::vector<parallel::Held>& holdings, const std::filesystem::path& file);

}  // namespace accelerate::run_state
