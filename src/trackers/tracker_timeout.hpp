#pragma once

#include <chrono>

namespace accelerate {

/// How long a flush, the end of a run, or one thing that a service is asked for may take: ACCELERATE_TRACKER_TIMEOUT,
/// 60 seconds if it is not set. @throws ConfigError
std::chrono::milliseconds tracker_timeout();

}  // namespace accelerate
