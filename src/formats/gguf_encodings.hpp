#pragma once

#include <cstdint>

namespace accelerate::formats {

/// How a GGUF file stores the elements of a tensor: in blocks of `block` elements of `block_bytes` bytes.
struct GgufEncoding {
  uint32_t id;
  const char* name;
  int64_t block;
  int64_t block_bytes;
  /// Writes blocks * block numbers. Null: only the sizes of this encoding are known.
  void (*decode)(const unsigned char* from, int64_t blocks, float* to);
};

/// Null for a number that the format doesn't have.
const GgufEncoding* find_gguf_encoding(uint32_t id);

}  // namespace accelerate::formats
