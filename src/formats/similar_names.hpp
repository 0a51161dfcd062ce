#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <string_view>
#include <vector>

namespace accelerate::formats {

/// Ends a message about a tensor that is not there: " Did you mean 'a' or 'b'?", or nothing. A common slip is a missing
/// or extra prefix, so it shows names with the same tail, three at most.
template <class Names> std::string similar_names(std::string_view name, const Names& names) {
  const auto tail = name.substr(name.find('.') + 1);
  std::vector<std::string> near;
  for (const std::string& other : names)
    if (near.size() < 3 && (other.ends_with(tail) || name.ends_with(other))) near.push_back(fmt::format("'{}'", other));
  return near.empty() ? "" : fmt::format(" Did you mean {}?", fmt::join(near, " or "));
}

}  // namespace accelerate::formats
