#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "accelerate/utils/export.hpp"

/// Models by the names that they have on Hugging Face's hub, where its programs have downloaded them. Needs no
/// LibTorch.
namespace accelerate::bigmodel {

/// Where Hugging Face's programs keep what they have downloaded.
ACCELERATE_API std::filesystem::path hub_cache();

/// The folder with the files of a model's newest revision there, as refs/main names it; nothing if there is none.
ACCELERATE_API std::optional<std::filesystem::path> in_hub_cache(const std::string& name);

/// The folder for an argument of commands that read a model's files: a path that is there, or a name in the cache,
/// whose folder is returned.
/// @throws CheckpointError for a text that is neither
ACCELERATE_API std::filesystem::path local_model(const std::filesystem::path& model);

}  // namespace accelerate::bigmodel
