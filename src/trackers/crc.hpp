#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace accelerate {

/// A checksum of 32 bits. `Polynomial` reflected: 0xEDB88320 is that of PNG and zip, 0x82F63B78 Castagnoli's.
template <uint32_t Polynomial> uint32_t crc_of(std::string_view bytes) {
  static constexpr auto kTable = [] {
    std::array<uint32_t, 256> entries{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit) value = value & 1 ? (value >> 1) ^ Polynomial : value >> 1;
      entries[i] = value;
    }
    return entries;
  }();
  uint32_t crc = 0xFFFFFFFFu;
  for (const char byte : bytes) crc = kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xFF] ^ (crc >> 8);
  return crc ^ 0xFFFFFFFFu;
}

}  // namespace accelerate
