#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace support {

/// A zip of uncompressed records, as torch.save and TorchScript write it, but without checksums, as by
/// torch.serialization.set_crc32_options(False).
inline std::string stored_zip(const std::vector<std::pair<std::string, std::string>>& records) {
  const auto little = [](uint64_t value, int bytes) {
    std::string text;
    for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> (8 * i) & 255);
    return text;
  };
  const auto zeros = [](size_t bytes) { return std::string(bytes, '\0'); };
  std::string file, directory;
  for (const auto& [name, bytes] : records) {
    const auto sizes = little(0, 4) + little(bytes.size(), 4) + little(bytes.size(), 4) + little(name.size(), 2) +
                       little(0, 2);  // checksum, twice the size, name, no extra field
    directory += "PK\1\2" + zeros(12) + sizes + zeros(10) + little(file.size(), 4) + name;
    file += "PK\3\4" + zeros(10) + sizes + name + bytes;
  }
  return file + directory + "PK\5\6" + little(0, 4) + little(records.size(), 2) + little(records.size(), 2) +
         little(directory.size(), 4) + little(file.size(), 4) + little(0, 2);
}

}  // namespace support
