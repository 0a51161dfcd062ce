#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

using FuzzTarget = int (*)(const uint8_t*, size_t);

/// Of a name in fuzz/CMakeLists.txt; null where there is none. The build makes its source.
FuzzTarget fuzz_target(const std::string& name);
