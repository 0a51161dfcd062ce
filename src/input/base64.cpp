#include "input/base64.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

namespace accelerate {
namespace {

constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

}  // namespace

std::string base64_encode(std::string_view bytes) {
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t here = std::min<size_t>(3, bytes.size() - i);
    uint32_t bits = 0;
    for (size_t k = 0; k < 3; ++k) bits = bits << 8 | (k < here ? static_cast<unsigned char>(bytes[i + k]) : 0u);
    for (size_t k = 0; k < 4; ++k) text += k <= here ? kLetters[bits >> (18 - 6 * k) & 63] : '=';
  }
  return text;
}

std::optional<std::string> base64_decode(std::string_view text) {
  static constexpr auto kValues = [] {
    std::array<int8_t, 256> values{};
    values.fill(-1);
    for (size_t i = 0; i < kLetters.size(); ++i)
      values[static_cast<unsigned char>(kLetters[i])] = static_cast<int8_t>(i);
    return values;
  }();
  if (text.size() % 4 != 0) return std::nullopt;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  for (size_t i = 0; i < text.size(); i += 4) {
    const size_t given = i + 4 == text.size() ? 4 - padding : 4;
    uint32_t bits = 0;
    for (size_t k = 0; k < 4; ++k) {
      const int value = k < given ? kValues[static_cast<unsigned char>(text[i + k])] : 0;
      if (value < 0) return std::nullopt;
      bits = bits << 6 | static_cast<uint32_t>(value);
    }
    if (bits & ((1u << (8 * (4 - given))) - 1)) return std::nullopt;  // bits that no byte has
    for (size_t k = 0; k + 1 < given; ++k) bytes += static_cast<char>(bits >> (16 - 8 * k) & 0xFF);
  }
  return bytes;
}

}  // namespace accelerate
