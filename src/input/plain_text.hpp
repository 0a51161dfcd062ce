#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// A program's line as a person would read it: valid UTF-8 without escape sequences, control characters and characters
/// that turn the direction of writing. Tabs become blanks, bytes that are no UTF-8 the replacement character.
ACCELERATE_API std::string plain_text(std::string_view line);

/// The same of a text of several lines, for terminals: it may have come out of a file or from a server.
ACCELERATE_API std::string plain_lines(std::string_view text);

/// Columns that plain text takes on a terminal.
ACCELERATE_API size_t cells(std::string_view plain);

/// Plain text in exactly `width` columns: filled up with blanks, or cut with "…" as its end. A character of two columns
/// is never halved.
ACCELERATE_API std::string fitted(std::string_view plain, size_t width, bool to_the_right = false);

}  // namespace accelerate
