#pragma once

#include "utils/counts.hpp"

namespace accelerate {

/// Events of computing in a narrower format; see utils/counts.hpp.
enum class PrecisionCount {
  autocast_regions,
  fp8_evaluations,  ///< forwards in evaluation mode with products in fp8
  number_of_counts
};

}  // namespace accelerate
