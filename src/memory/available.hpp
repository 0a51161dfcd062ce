#pragma once

#include <cstdint>
#include <optional>

namespace accelerate {

/// Bytes that the system could give without swapping. Nothing where it does not say.
std::optional<int64_t> available_in_system();

/// The same within the limits of this process's control group (version 1 or 2) and of those around it. Cache of files
/// that nobody has used lately counts as available.
std::optional<int64_t> available_memory();

}  // namespace accelerate
