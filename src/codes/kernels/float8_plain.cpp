#include "codes/kernels/float8_loops.hpp"

namespace accelerate::codes::kernels {
const Float8Loops& plain_float8() { return kFloat8Loops; }
}  // namespace accelerate::codes::kernels
