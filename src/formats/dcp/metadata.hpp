#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "formats/dcp/box.hpp"

/// The contents of `.metadata`. Reading it needs no LibTorch.
namespace accelerate::formats {

inline constexpr const char* kDcpMetadataFile = ".metadata";
inline constexpr const char* kDcpVersion = "1.0.0";

/// The bytes of one item: an archive as torch.save writes it, somewhere in a data file.
struct DcpLocation {
  /// Relative to the folder; empty when nothing was stored, which only parts without elements may do.
  std::string file;
  int64_t offset = 0;
  int64_t length = 0;
};

struct DcpChunk {
  DcpBox box;
  DcpLocation location;
};

struct DcpTensorInfo {
  std::string dtype = "float32";  ///< PyTorch's name without "torch."
  bool requires_grad = false;
  std::vector<int64_t> sizes;  ///< of the whole tensor
  /// Within the tensor, without overlap; whether they cover it is checked when it is read.
  std::vector<DcpChunk> chunks;
};

/// Keys of dicts and indices of lists that lead from the saved object to a value.
using DcpPath = std::vector<std::variant<std::string, int64_t>>;

/// A value of the saved object under its flat name: the steps of its path joined by dots.
struct DcpEntry {
  std::string name;
  std::optional<DcpPath> path;                       ///< unset where the file doesn't have it
  std::variant<DcpTensorInfo, DcpLocation> content;  ///< a tensor in parts, or the place of any other object
};

/// The contents of the file `.metadata`, in its order.
struct DcpMetadata {
  std::vector<DcpEntry> entries;
};

/// @param file  Its name, for messages.
/// @throws CheckpointError for a pickle with anything but what DCP writes, and for contents that contradict themselves:
/// parts outside of their tensor or over each other,
///   parts without a place, places outside of the folder, transformed (compressed, encrypted) items.
DcpMetadata parse_dcp_metadata(std::string_view bytes, const std::string& file);

/// That of a folder. @throws CheckpointError as above, and where there is none, with the probable reason
DcpMetadata read_dcp_metadata(const std::filesystem::path& folder);

/// The bytes of `.metadata`. @throws CheckpointError if a name is not UTF-8.
std::string format_dcp_metadata(const DcpMetadata& metadata);

}  // namespace accelerate::formats
