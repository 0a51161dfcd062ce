#pragma once

#include <utility>

#include "utils/raise.hpp"

namespace accelerate::launcher {

/// Throws ConfigError with the formatted text unless `condition` holds. The arguments are evaluated in either case.
template <class... Args> void require(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) raise<ConfigError>(text, std::forward<Args>(args)...);
}

}  // namespace accelerate::launcher
