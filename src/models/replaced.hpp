#pragma once

#include <string>
#include <string_view>

namespace accelerate {

/// A text with each `from`, from left to right, as `to`.
inline std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  for (size_t at = 0; (at = text.find(from)) != text.npos; text.remove_prefix(at + from.size()))
    result.append(text.substr(0, at)).append(to);
  return result.append(text);
}

}  // namespace accelerate
