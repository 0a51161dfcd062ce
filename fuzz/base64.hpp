#pragma once

#include <cstdint>
#include <string>

/// The bytes of a line in base64.
inline std::string from_base64(const std::string& line) {
  static const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : line) {
    const size_t digit = digits.find(c);
    if (digit == std::string::npos) break;  // the padding
    bits = bits << 6 | static_cast<uint32_t>(digit);
    count += 6;
    if (count < 8) continue;
    count -= 8;
    bytes += static_cast<char>(bits >> count);
  }
  return bytes;
}
