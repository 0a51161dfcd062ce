#pragma once

#include <c10/util/Half.h>

#include <cmath>

#include "utils/raise.hpp"

namespace accelerate::codes {

/// A block's scale or least value as GGUF keeps it. @throws ConfigError for one beyond fp16
inline c10::Half half_scale(float value) {
  const c10::Half half(value);
  if (!std::isfinite(static_cast<float>(half)))
    raise<ConfigError>(
        "encode: a block's scale or least value is {}, beyond what fp16 holds (65504), in which GGUF's blocks keep it. "
        "Scale the tensor, or use nf4, whose scales are fp32",
        value);
  return half;
}

}  // namespace accelerate::codes
