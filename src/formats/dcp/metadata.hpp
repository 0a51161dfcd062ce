#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "formats/dcp/box.hpp"
#include "formats/dcp/shards.hpp"

/// The contents of `.metadata`, or of the layout in its place. Reading it needs no LibTorch.
namespace accelerate::formats {

inline constexpr const char* kDcpMetadataFile = ".metadata";
inline constexpr const char* kDcpLayoutFile = ".accelerate_layout";
inline constexpr const char* kDcpVersion = "1.0.0";

/// The bytes of one item: an archive as torch.save writes it, somewhere in a data file.
struct DcpLocation {
  /// Relative to the folder; empty when nothing was stored, which only parts without elements may do.
  std::string file;
  int64_t offset = 0;
  int64_t length = 0;  ///< 0 in a layout: the file's index knows the place
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
  /// In a layout: where the parts are follows from this, and none are listed. See DcpFolder::parts_under().
  std::optional<DcpShards> shards = std::nullopt;
};

/// Keys of dicts and indices of lists that lead from the saved object to a value.
using DcpPath = std::vector<std::variant<std::string, int64_t>>;

/// A value of the saved object under its flat name: the steps of its path joined by dots.
struct DcpEntry {
  std::string name;
  std::optional<DcpPath> path;                       ///< unset where the file doesn't have it
  std::variant<DcpTensorInfo, DcpLocation> content;  ///< a tensor in parts, or the place of any other object
};

/// The contents of the file `.metadata`, or of a layout, in its order.
struct DcpMetadata {
  std::vector<DcpEntry> entries;
  int64_t ranks = 0;      ///< of a layout: that saved
  uint32_t checksum = 0;  ///< of a layout: its text's, which the index of each rank's file repeats
  bool is_layout() const { return ranks > 0; }
};

/// @param file  Its name, for messages.
/// @throws CheckpointError for a pickle with anything but what DCP writes, and for contents that contradict themselves:
/// parts outside of their tensor or over each other,
///   parts without a place, places outside of the folder, transformed (compressed, encrypted) items.
DcpMetadata parse_dcp_metadata(std::string_view bytes, const std::string& file);

/// Whether there is a distributed checkpoint in a folder, by what is written last.
bool is_dcp_folder(const std::filesystem::path& folder);
/// `.metadata` of a folder, or its layout. @throws CheckpointError as above, and where there is none, with the probable
/// reason
DcpMetadata read_dcp_metadata(const std::filesystem::path& folder);

/// The bytes of `.metadata`. @throws CheckpointError if a name is not UTF-8.
std::string format_dcp_metadata(const DcpMetadata& metadata);

}  // namespace accelerate::formats
