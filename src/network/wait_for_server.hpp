#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace accelerate {

/// Blocks until somebody listens on that port of `host` (a name or an address, of which any will do), by connecting and
/// hanging up; or until `end`.
/// @return false: nobody did by `end`, and `why` says what stood in the way last
bool wait_for_server(const std::string& host, uint16_t port, std::chrono::steady_clock::time_point end,
                     std::string& why);

}  // namespace accelerate
