#include "launch/system/random_hex.hpp"

#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "utils/raise.hpp"

namespace accelerate::launcher {

std::string random_hex(size_t bytes) {
  std::vector<unsigned char> random(bytes);
  if (::getrandom(random.data(), bytes, 0) != static_cast<ssize_t>(bytes))
    raise<LaunchError>("no random numbers: {}", std::strerror(errno));
  return fmt::format("{:02x}", fmt::join(random, ""));
}

}  // namespace accelerate::launcher
