#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/backends/backend.hpp"

namespace accelerate::comm {
namespace {

c10::intrusive_ptr<c10d::Backend> create(const c10::intrusive_ptr<c10d::Store>& store, const BackendOptions& options) {
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, static_cast<int>(options.rank),
                                                     static_cast<int>(options.world_size), nccl);
}

}  // namespace

const BackendFactory kNccl{"nccl", true, create, ""};

}  // namespace accelerate::comm
