#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "comm/backends/backend.hpp"

namespace accelerate::comm {
namespace {

c10::intrusive_ptr<c10d::Backend> create_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                              const BackendOptions& options) {
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = options.timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, static_cast<int>(options.rank),
                                                     static_cast<int>(options.world_size), nccl);
}

bool nccl_has_thrown(const std::exception& error) {
  return dynamic_cast<const c10::DistBackendError*>(&error) != nullptr;
}

}  // namespace

const BackendFactory kNccl{"nccl", true, create_nccl, nccl_has_thrown, ""};

}  // namespace accelerate::comm
