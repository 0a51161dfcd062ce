#include "optim/kernels/step_bodies.hpp"

namespace accelerate::optim::kernels {
const AllLoops& plain_loops() { return kLoops; }
}  // namespace accelerate::optim::kernels
