#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <string>
#include <vector>

namespace accelerate::comm {

/// "0, 2, 5", for messages.
inline std::string list_of(const std::vector<int64_t>& ranks) { return fmt::format("{}", fmt::join(ranks, ", ")); }

}  // namespace accelerate::comm
