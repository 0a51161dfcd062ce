#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/export.hpp"

namespace accelerate {

/// The name in `valid` that a mistyped `given` most likely meant, for messages of the kind "did you mean …?".
///
/// Compares without regard to case and to '-' against '_', by the least number of inserted, removed, changed or swapped letters.
/// @return nothing when no name is near enough (more than a third of the letters differ).
ACCELERATE_API std::optional<std::string> nearest_name(std::string_view given, const std::vector<std::string>& valid);

}  // namespace accelerate
