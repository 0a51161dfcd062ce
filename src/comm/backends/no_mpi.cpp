#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/backends/backend.hpp"

namespace accelerate::comm {

const BackendFactory kMpi{"mpi", false, nullptr, nullptr,
                          "use a LibTorch built with MPI and configure with -DACCELERATE_MPI=ON"};

}  // namespace accelerate::comm
