#include "trackers/tracker_timeout.hpp"

#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate {

std::chrono::milliseconds tracker_timeout() {
  constexpr const char* kVariable = "ACCELERATE_TRACKER_TIMEOUT";
  const double seconds = environment::number(kVariable).value_or(60);
  if (seconds < 0 || seconds > 1e6)
    raise<ConfigError>("{}: found {}, expected seconds from 0 to 1000000", kVariable, seconds);
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

}  // namespace accelerate
