#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/formats/gguf.hpp"
#include "formats/gguf_encodings.hpp"

namespace accelerate::formats {

/// A tensor as the file has it.
struct GgufTensor {
  std::string name;
  std::vector<int64_t> shape;  ///< PyTorch's order of dimensions, the reverse of the file's.
  const GgufEncoding* encoding = nullptr;
  int64_t begin = 0;  ///< Byte of the file.
  int64_t bytes = 0;

  int64_t row() const { return shape.empty() ? 1 : shape.back(); }  ///< elements
  int64_t row_bytes() const { return row() / encoding->block * encoding->block_bytes; }
};

/// A key of the metadata with its value, as they lie in the file: numbers keep their widths if they are written again.
struct GgufEntry {
  std::string key;
  int64_t begin = 0;  ///< byte of the file
  int64_t bytes = 0;
  int64_t elements = 0;  ///< of an array
};

/// Whether lists of many elements, the vocabulary's, become a part of the metadata. They are checked in any case;
/// readers that only want tensors need not hold them in memory.
enum class GgufLists { all, short_ones };
inline constexpr int64_t kMostInShortList = 1024;

struct GgufHeader {
  uint32_t version = 0;
  int64_t alignment = 32;
  GgufMetadata metadata;
  std::vector<GgufEntry> entries;  ///< in the order of the file
  std::vector<GgufTensor> tensors;
};

/// Parses and checks the start of a file; needs nothing of LibTorch.
/// @param bytes  The file, or as much of it as contains the header.
/// @param file  Its name, for messages.
/// @param lists  `short_ones` leaves out of `metadata` (`entries` have them) lists of more than kMostInShortList.
/// Source: ggml's docs/gguf.md; versions 2 and 3, little-endian.
/// @throws CheckpointError for the first rule of the format that is broken.
GgufHeader parse_gguf_header(std::string_view bytes, const std::string& file, GgufLists lists = GgufLists::all);

/// @throws CheckpointError naming the first tensor that does not lie within a file of that size.
void check_gguf_data(const GgufHeader& header, int64_t file_bytes, const std::string& file);

}  // namespace accelerate::formats
