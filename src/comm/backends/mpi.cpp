#include <torch/csrc/distributed/c10d/ProcessGroupMPI.hpp>

#include "comm/backends/backend.hpp"

namespace accelerate::comm {
namespace {

// MPI knows its own ranks; the store is not used and the timeout is MPI's.
c10::intrusive_ptr<c10d::Backend> create_mpi(const c10::intrusive_ptr<c10d::Store>&, const BackendOptions& options) {
  return c10d::ProcessGroupMPI::createProcessGroupMPI(options.ranks);
}

}  // namespace

const BackendFactory kMpi{"mpi", true, create_mpi, nullptr, ""};

}  // namespace accelerate::comm
