#include "accelerate/utils/memory.hpp"

#include <ATen/DeviceAccelerator.h>
#include <c10/util/Exception.h>

#include <new>
#include <stdexcept>
#include <string_view>

#include "memory/huge_pages.hpp"

namespace accelerate {

bool should_reduce_batch_size(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error)) return true;
  if (!dynamic_cast<const std::runtime_error*>(&error) && !dynamic_cast<const c10::Error*>(&error)) return false;
  const std::string_view text = error.what();
  for (const char* sign :
       {" out of memory.", "MPS backend out of memory",
        // CUDA's and HIP's own messages, for memory that LibTorch's allocator does not manage:
        // kernels' stacks, handles, the libraries' work spaces.
        " error: out of memory", "'out of memory'", "BLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
        "SOLVER_STATUS_ALLOC_FAILED", "SPARSE_STATUS_ALLOC_FAILED", "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
        "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory",
        "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed"})
    if (text.find(sign) != std::string_view::npos) return true;
  return false;
}

void clear_device_cache() {
  if (at::getAccelerator() && at::accelerator::deviceCount() > 0) at::accelerator::emptyCache();
}

void return_freed_memory() {
  clear_device_cache();
  give_freed_memory_back();
}

}  // namespace accelerate
