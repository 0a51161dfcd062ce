#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/zero/zero_settings.hpp"

/// Rules about more than one key.
namespace accelerate::zero {

/// The findings of a reader.
struct Findings {
  std::vector<std::string> problems;  ///< what is wrong
  std::vector<std::string> later;     ///< what is right, and not in this version
  std::vector<std::string> warnings;
};

/// The keys that the document has, as the table spells them.
using GivenKeys = std::set<std::string, std::less<>>;

/// Older keys, defaults that depend on other keys or on the version, and the three numbers of a batch.
void derive(ZeroSettings& settings, const GivenKeys& given, const ReadOptions& options, Findings& findings);

/// Settings that exclude each other.
void check_together(const ZeroSettings& settings, const GivenKeys& given, const ReadOptions& options,
                    Findings& findings);

}  // namespace accelerate::zero
