#pragma once

#include <cstdint>

#include "accelerate/codes/codes.hpp"

namespace accelerate::codes {

/// Encodes blocks of 256 elements, one after the other, on this thread. The codes are the same on all processors.
/// @param encoding  q2_k to q6_k. @param from  finite numbers. @param with_avx2  where the processor has it
/// @throws ConfigError for a block whose scale fp16 can't hold
void encode_k_blocks(Encoding encoding, const float* from, int64_t blocks, uint8_t* to, bool with_avx2 = true);

}  // namespace accelerate::codes
