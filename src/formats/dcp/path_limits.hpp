#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "formats/dcp/metadata.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {

/// Lists are as long as their largest index, stored or not: Python fills gaps with None. So the lengths of all lists of
/// a file together are bounded by what is there.
class DcpPathLimits {
 public:
  static constexpr size_t kMostSteps = 100;  ///< of a path: its readers are recursive

  /// @param values  that the file has room for
  explicit DcpPathLimits(int64_t values) : most_(kMostUnstored + values) {}

  /// @return what is wrong with the path of one more value: "has …"; empty: nothing
  std::string add(const DcpPath& path) {
    if (path.empty() || path.size() > kMostSteps)
      return fmt::format("has {} steps, expected 1 to {}.", path.size(), kMostSteps);
    DcpPath list;
    for (const auto& step : path) {
      if (const auto* index = std::get_if<int64_t>(&step)) {
        const auto [found, fresh] = lengths_.try_emplace(list, 0);
        if (fresh) all_ += static_cast<int64_t>(list.size());  // which the table repeats
        const bool fits = *index >= 0 && *index < most_;
        const int64_t more = fits ? std::max<int64_t>(*index + 1 - found->second, 0) : 0;
        if (!fits || (all_ += more) > most_)
          return fmt::format(
              "has the list index {}, with which lists have more than {} items: too many for a file of its length.",
              *index, most_);
        found->second += more;
      }
      list.push_back(step);
    }
    return {};
  }

 private:
  static constexpr int64_t kMostUnstored = 100'000;

  std::map<DcpPath, int64_t> lengths_;  ///< by where the list is
  int64_t most_, all_ = 0;
};

}  // namespace accelerate::formats
