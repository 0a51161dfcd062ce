#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace accelerate::comm {

/// "0, 2, 5", for messages.
inline std::string list_of(const std::vector<int64_t>& ranks) {
  std::string text;
  for (const int64_t rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

}  // namespace accelerate::comm
