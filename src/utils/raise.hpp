#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "accelerate/utils/error.hpp"

namespace accelerate {

/// Throws `E` with the formatted text: `raise<ShapeError>("gather: '{}' has {} rows, expected {}", name, found,
/// expected)`. Lists go through fmt::join. The text follows the recipe of error.hpp; format strings are checked by the
/// compiler.
///
/// LibTorch brings an fmt of its own, which sources that include LibTorch find first; others use the system's. Either
/// is used as headers only (FMT_HEADER_ONLY), in a namespace that bears its version, so that both may be in one
/// program.
template <class E, class... Args> [[noreturn]] void raise(fmt::format_string<Args...> text, Args&&... args) {
  throw E(fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace accelerate
