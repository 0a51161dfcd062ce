#pragma once

#include <filesystem>
#include <map>
#include <string>

namespace accelerate::formats {

/// The index of a checkpoint in several files: tensor -> name of the file beside the index that holds it.
///
/// Two forms: `{"weight_map": {tensor: file}, ...}`, which libraries write, and the map alone, which Hugging Face
/// Accelerate's documentation shows. Needs nothing of LibTorch.
/// @throws CheckpointError if the file can't be read or is neither, or if it points out of its folder.
std::map<std::string, std::string> read_index(const std::filesystem::path& path);

/// Is this a name that indexes have? `*.index.json`, or `index.json` as in that documentation.
bool is_index_name(const std::filesystem::path& path);

}  // namespace accelerate::formats
