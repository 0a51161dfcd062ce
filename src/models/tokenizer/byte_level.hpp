#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "models/tokenizer/utf8.hpp"

namespace accelerate::models {

/// Vocabularies spell every byte as a visible character: printable Latin-1 ones as themselves, the other 68 as U+0100
/// and following, in order. Source: GPT-2's encoder.
inline const std::array<int16_t, 0x144>& byte_of_character() {
  static const auto table = [] {
    std::array<int16_t, 0x144> bytes{};
    bytes.fill(-1);
    size_t next = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const bool visible = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      bytes[visible ? static_cast<size_t>(byte) : next++] = static_cast<int16_t>(byte);
    }
    return bytes;
  }();
  return table;
}

/// Appends the character that a byte is spelt as.
inline void append_spelt(char byte, std::string& text) {
  static const auto characters = [] {
    std::array<std::string, 256> all;
    for (size_t code = 0; code < byte_of_character().size(); ++code)
      if (const auto spelt = byte_of_character()[code]; spelt >= 0)
        all[static_cast<size_t>(spelt)] =
            code < 0x80 ? std::string(1, static_cast<char>(code))
                        : std::string{static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
    return all;
  }();
  text += characters[static_cast<unsigned char>(byte)];
}

/// The bytes that a token stands for; nothing if it has a character that stands for none.
inline std::optional<std::string> bytes_of_token(std::string_view token) {
  std::string bytes;
  while (!token.empty()) {
    const auto step = next_utf8(token);
    const auto code = step.valid ? code_point(token.substr(0, step.bytes)) : 0x144U;
    if (code >= byte_of_character().size() || byte_of_character()[code] < 0) return std::nullopt;
    bytes += static_cast<char>(byte_of_character()[code]);
    token.remove_prefix(step.bytes);
  }
  return bytes;
}

}  // namespace accelerate::models
