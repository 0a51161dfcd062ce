#pragma once

#include <cstddef>
#include <string>

namespace accelerate::launcher {

/// So many random bytes, fit for secrets, as hexadecimal digits. @throws LaunchError when the kernel has none.
std::string random_hex(size_t bytes);

}  // namespace accelerate::launcher
