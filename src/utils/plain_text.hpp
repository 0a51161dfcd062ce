#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace accelerate::launcher {

/// What a person would read of a line that a program wrote: valid UTF-8 without escape sequences, control characters
/// and characters that turn the direction of writing. Tabs become blanks, bytes that are no UTF-8 the replacement
/// character.
std::string plain_text(std::string_view line);

/// Columns that plain text takes on a terminal.
size_t cells(std::string_view plain);

/// Plain text in exactly `width` columns: filled up with blanks, or cut with "…" as its end. A character of two columns
/// is never halved.
std::string fitted(std::string_view plain, size_t width, bool to_the_right = false);

}  // namespace accelerate::launcher
