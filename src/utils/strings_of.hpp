#pragma once

#include <functional>
#include <string>
#include <vector>

namespace accelerate {

/// One text per element, for messages that list them: strings_of(entries, &Entry::name), strings_of(boxes, to_string).
/// (Views of std::ranges would do, but Clang before 16 can't compile those of GCC's library.)
template <class Range, class Text> std::vector<std::string> strings_of(const Range& range, Text&& text) {
  std::vector<std::string> result;
  for (const auto& element : range) result.emplace_back(std::invoke(text, element));
  return result;
}

}  // namespace accelerate
