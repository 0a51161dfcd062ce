#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace accelerate {

/// The entry of one tensor in the header of a safetensors file.
struct SafetensorsInfo {
  std::string dtype;           ///< The format's name, e.g. "F32" or "BF16".
  std::vector<int64_t> shape;  ///< In elements, row major; empty for a scalar.
  int64_t begin = 0;           ///< First byte, counted from the start of the data section.
  int64_t end = 0;             ///< One past the last byte.
};

}  // namespace accelerate
