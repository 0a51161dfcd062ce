#pragma once

#include <functional>

#include "case.hpp"

namespace equivalence {

/// The smallest case found that still fails: without operations that do not matter, with simpler settings.
/// @param fails     whether a case fails in the same way
/// @param attempts  how many cases may be tried
Case shrink(Case what, const std::function<bool(const Case&)>& fails, int64_t attempts);

}  // namespace equivalence
