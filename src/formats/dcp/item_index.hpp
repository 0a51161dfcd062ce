#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/input_file.hpp"

/// The index at the end of a rank's file: where its items lie. docs/formats/dcp.md is the specification. Needs no
/// LibTorch.
namespace accelerate::formats {

struct DcpIndexedItem {
  uint32_t entry = 0;       ///< its number in the layout
  uint32_t box_number = 0;  ///< among the boxes of the rank's piece
  int64_t offset = 0, length = 0;
};

struct DcpItemIndex {
  int64_t rank = 0;
  uint32_t layout = 0;                ///< the checksum of the layout's text
  std::vector<DcpIndexedItem> items;  ///< by entry and box

  /// Null: there is none.
  const DcpIndexedItem* find(size_t entry, int64_t box_number) const;
};

/// The bytes behind the last item.
std::string format_item_index(const DcpItemIndex& index);
/// @throws CheckpointError where it is missing or damaged, or names bytes that are not before it
DcpItemIndex read_item_index(const InputFile& file);

}  // namespace accelerate::formats
