#ifdef __AVX512BW__
#include "optim/kernels/step_bodies.hpp"
#else
#include "optim/kernels/step_loops.hpp"
#endif

namespace accelerate::optim::kernels {
#ifdef __AVX512BW__
const AllLoops* avx512_loops() {
  const bool there = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return there ? &kLoops : nullptr;
}
#else
const AllLoops* avx512_loops() { return nullptr; }
#endif
}  // namespace accelerate::optim::kernels
