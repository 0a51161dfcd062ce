#ifdef __AVX2__
#include "codes/kernels/float8_loops.hpp"
#else
#include "codes/kernels/float8.hpp"
#endif

namespace accelerate::codes::kernels {
#ifdef __AVX2__
const Float8Loops* avx2_float8() { return &kFloat8Loops; }
#else
const Float8Loops* avx2_float8() { return nullptr; }
#endif
}  // namespace accelerate::codes::kernels
