#include "codes/cuda/launch.hpp"

namespace accelerate::codes::cuda {

const Launcher kNvrtc = nullptr;

}  // namespace accelerate::codes::cuda
