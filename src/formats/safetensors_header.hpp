#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "accelerate/formats/safetensors_info.hpp"
#include "formats/input_file.hpp"

namespace accelerate::formats {

inline constexpr int64_t kLengthBytes = 8;  ///< The file starts with the header's length, a little-endian u64.
/// The format's limit; a larger number is more likely noise than a header.
inline constexpr int64_t kMaxHeaderBytes = 100'000'000;
/// The writer pads the header so that the data section starts on a multiple of this.
inline constexpr int64_t kHeaderAlignment = 8;
inline constexpr std::string_view kMetadataKey = "__metadata__";

struct SafetensorsHeader {
  std::vector<std::string> names;  ///< In the order of their bytes.
  std::unordered_map<std::string, SafetensorsInfo> tensors;
  std::map<std::string, std::string> metadata;
  int64_t data_begin = 0;  ///< Byte of the file at which the data section starts.
};

/// The header of a file, of which no more is read. Needs no LibTorch. @throws CheckpointError as the next
SafetensorsHeader read_safetensors_header(const InputFile& file);

/// Parses and checks the start of a file.
/// @param bytes  The file, or as much of it as contains the header.
/// @param file_bytes  Size of the whole file.
/// @param file  Its name, for messages.
/// @throws CheckpointError for the first rule of the format that is broken.
SafetensorsHeader parse_safetensors_header(std::string_view bytes, int64_t file_bytes, const std::string& file);

/// Length field, JSON and padding for tensors that lie in this order without gaps.
/// @throws CheckpointError if a name or a text is not UTF-8 or the header gets longer than the format allows.
std::string format_safetensors_header(const std::vector<std::pair<std::string, SafetensorsInfo>>& tensors,
                                      const std::map<std::string, std::string>& metadata, const std::string& file);

}  // namespace accelerate::formats
