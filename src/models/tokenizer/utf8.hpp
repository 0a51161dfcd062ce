#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace accelerate::models {

inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

/// The beginning of the text: a character of `bytes` bytes, ill-formed bytes to be replaced by one U+FFFD, or the start
/// of a character that ends too early (`incomplete`).
struct Utf8Step {
  size_t bytes;
  bool valid;
  bool incomplete;
};

/// Ill-formed sequences are cut as Unicode's "maximal subparts" are, which Rust and ICU agree on. @param text  not
/// empty
inline Utf8Step next_utf8(std::string_view text) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = at(0);
  if (lead < 0x80) return {1, true, false};
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4) return {1, false, false};
  // The second byte's range keeps out overlong forms, surrogates and what is above U+10FFFF.
  const unsigned least = lead == 0xE0   ? 0xA0
                         : lead == 0xF0 ? 0x90
                                        : 0x80,
                 most = lead == 0xED   ? 0x9F
                        : lead == 0xF4 ? 0x8F
                                       : 0xBF;
  for (size_t i = 1; i < length; ++i) {
    if (i == text.size()) return {i, false, true};
    if (i == 1 ? at(i) < least || at(i) > most : at(i) < 0x80 || at(i) > 0xBF) return {i, false, false};
  }
  return {length, true, false};
}

/// Replaces what is ill-formed. @param keep_incomplete  Leaves a character that has begun at the end in `text`, and
/// takes all else away from it.
inline std::string take_utf8(std::string& text, bool keep_incomplete) {
  std::string result;
  std::string_view rest = text;
  while (!rest.empty()) {
    const auto step = next_utf8(rest);
    if (step.incomplete && keep_incomplete) break;
    result.append(step.valid ? rest.substr(0, step.bytes) : kReplacement);
    rest.remove_prefix(step.bytes);
  }
  text = std::string(rest);
  return result;
}

/// Appends a code point.
inline void append_utf8(std::string& text, uint32_t code) {
  const auto tail = [&](unsigned shift) { text += static_cast<char>(0x80 | (code >> shift & 0x3F)); };
  if (code < 0x80) {
    text += static_cast<char>(code);
  } else if (code < 0x800) {
    text += static_cast<char>(0xC0 | code >> 6), tail(0);
  } else if (code < 0x10000) {
    text += static_cast<char>(0xE0 | code >> 12), tail(6), tail(0);
  } else {
    text += static_cast<char>(0xF0 | code >> 18), tail(12), tail(6), tail(0);
  }
}

/// The code point of a valid character.
inline uint32_t code_point(std::string_view character) {
  if (character.size() == 1) return static_cast<unsigned char>(character[0]);
  uint32_t code = static_cast<unsigned char>(character[0]) & (0x7FU >> character.size());
  for (size_t i = 1; i < character.size(); ++i) code = code << 6 | (static_cast<unsigned char>(character[i]) & 0x3FU);
  return code;
}

}  // namespace accelerate::models
