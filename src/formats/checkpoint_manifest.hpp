#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "accelerate/utils/export.hpp"
#include "utils/file_checksums.hpp"

/// The list of a checkpoint's files that save_state() writes last, docs/formats/checkpoint.md. Needs no LibTorch.
namespace accelerate::formats {

inline constexpr const char* kManifestFile = "checkpoint.json";

struct CheckpointManifest {
  std::map<std::string, FileChecksums> files = {};  ///< by their paths from the folder, with '/' on every system
  int64_t part_bytes = kChecksumPartBytes;          ///< of which there is a checksum each
  int64_t world_size = 1;
  std::string layout = {};                     ///< of models and optimizers: "safetensors", "sharded", …
  int64_t step = 0;                            ///< of the optimizers
  int64_t iteration = 0;                       ///< the checkpoint's number
  std::string accelerate = {}, libtorch = {};  ///< versions
  bool operator==(const CheckpointManifest&) const = default;
};

/// @throws CheckpointError for a name that is no UTF-8
ACCELERATE_API std::string format_manifest(const CheckpointManifest& manifest);
/// @param source  for messages  @return nothing for JSON that is no manifest at all: another's file of this name
/// @throws CheckpointError where it is damaged or of a later version
ACCELERATE_API std::optional<CheckpointManifest> parse_manifest(std::string_view text, const std::string& source);
/// The one of a folder; nothing where it has none.
ACCELERATE_API std::optional<CheckpointManifest> read_manifest(const std::filesystem::path& folder);
/// Takes what lies below `removed`, which somebody has taken out of a checkpoint, out of the manifest beside it, if
/// there is one that lists it. @throws CheckpointError, ResourceError
ACCELERATE_API void forget_in_manifest(const std::filesystem::path& removed);

}  // namespace accelerate::formats
