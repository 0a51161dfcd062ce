#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace accelerate::launcher {

/// Bits of torchrun's notation for "which streams".
enum Streams : int { kNoStream = 0, kStdout = 1, kStderr = 2 };

/// Reads "3" (all ranks alike) or "0:1,2:3" (by local rank; the others none).
/// @return one value per local rank, a combination of Streams.
/// @throws ConfigError naming `flag`.
std::vector<int> parse_streams(const std::string& flag, const std::string& text, int64_t local_world_size);

}  // namespace accelerate::launcher
