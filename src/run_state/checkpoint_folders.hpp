#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

/// Folders of checkpoints that name themselves: checkpoint_0, checkpoint_1, …
namespace accelerate::run_state {

std::filesystem::path checkpoint_folder(const std::filesystem::path& all, int64_t number);
/// Nothing for a folder of another name.
std::optional<int64_t> checkpoint_number(const std::filesystem::path& folder);
/// The one with the highest number. @throws CheckpointError if there is none.
std::filesystem::path newest_checkpoint(const std::filesystem::path& all);
/// Removes the oldest above the limit.
void prune_checkpoints(const std::filesystem::path& all, int64_t limit);

/// @throws CheckpointError when there is no folder then.
void make_folder(const std::filesystem::path& folder);

}  // namespace accelerate::run_state
