#pragma once

#include "accelerate/codes/codes.hpp"
#include "formats/gguf_encodings.hpp"

namespace accelerate::codes {

/// How a GGUF file stores this encoding. @throws InternalError for those that are not GGUF's
const formats::GgufEncoding& gguf_encoding(Encoding encoding);

}  // namespace accelerate::codes
