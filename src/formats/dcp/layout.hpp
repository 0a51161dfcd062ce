#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/dcp/metadata.hpp"

/// The layout of a checkpoint: which rank has which parts, as rules instead of a list of all parts, so that it grows
/// with the tensors and not with the ranks. Where a part lies in its rank's file says that file's index
/// (item_index.hpp). docs/formats/dcp.md is the specification. Needs no LibTorch.
namespace accelerate::formats {

struct DcpLayout {
  DcpMetadata metadata;
  std::string text;  ///< of the file
};

/// @param entries  tensors with their pieces, and objects, whose location names the file of the rank that has it. Names
/// are their paths' steps, joined by dots.
/// @throws CheckpointError for what parse_dcp_layout() would refuse, and for paths that are not UTF-8
DcpLayout make_dcp_layout(const std::vector<DcpEntry>& entries, int64_t ranks);

/// @param file  its name, for messages @throws CheckpointError for damage, and for rules that contradict themselves
DcpMetadata parse_dcp_layout(std::string_view text, const std::string& file);

/// "__3_0.distcp". Python numbers a rank's files; we always write one.
std::string dcp_data_file(int64_t rank);
/// The rank of such a name.
int64_t rank_of_data_file(const std::string& name);
/// The flat name of a value: its path's steps joined by dots.
std::string dcp_name(const DcpPath& path);

/// What one rank has by a layout.
struct DcpHeldItem {
  size_t entry = 0;  ///< by its number in the layout
  int64_t box_number = 0;
  DcpBox box;  ///< of a tensor: the rank's piece consists of these boxes, in this order
};
/// All of it, by entry and box.
std::vector<DcpHeldItem> held_by(const DcpMetadata& layout, int64_t rank);

}  // namespace accelerate::formats
