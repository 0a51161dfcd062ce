#ifdef __AVX2__
#include "optim/kernels/step_bodies.hpp"
#else
#include "optim/kernels/step_loops.hpp"
#endif

namespace accelerate::optim::kernels {
#ifdef __AVX2__
const AllLoops* avx2_loops() { return __builtin_cpu_supports("avx2") ? &kLoops : nullptr; }
#else
const AllLoops* avx2_loops() { return nullptr; }
#endif
}  // namespace accelerate::optim::kernels
