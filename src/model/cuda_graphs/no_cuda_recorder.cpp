#include "model/cuda_graphs/recorder.hpp"

namespace accelerate {

const Recorder kCudaRecorder = nullptr;

}  // namespace accelerate
