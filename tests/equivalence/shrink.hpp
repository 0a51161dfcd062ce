#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "case.hpp"

namespace equivalence {

/// Which of some cases fail in the way that matters. Several at once, as starting processes costs more than they do.
using Fails = std::function<std::vector<bool>(const std::vector<Case>&)>;

/// The smallest case found that still fails: without operations that do not matter, with simpler settings.
/// @param rounds  how often `fails` may be asked
Case shrink(Case what, const Fails& fails, int64_t rounds);

}  // namespace equivalence
