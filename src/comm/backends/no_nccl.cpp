#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/backends/backend.hpp"

namespace accelerate::comm {

const BackendFactory kNccl{"nccl", false, nullptr, nullptr,
                           "use a LibTorch built for CUDA and install the NCCL headers, then configure again"};

}  // namespace accelerate::comm
