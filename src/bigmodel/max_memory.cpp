#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

#include <cstdint>
#include <optional>

#include "accelerate/bigmodel/device_map.hpp"
#include "accelerate/utils/error.hpp"
#include "memory/available.hpp"

namespace accelerate {
namespace {

double expect_known(std::optional<int64_t> bytes) {
  if (!bytes)
    throw ResourceError(
        "get_max_memory: /proc/meminfo doesn't say how much memory is available. Give max_memory instead.");
  return static_cast<double>(*bytes);
}

}  // namespace

MaxMemory get_max_memory() {
  MaxMemory memory;
  if (const auto accelerator = at::getAccelerator(); accelerator && at::accelerator::deviceCount() > 0) {
    at::globalContext().lazyInitDevice(*accelerator);
    for (c10::DeviceIndex i = 0; i < at::accelerator::deviceCount(); ++i) {
      if (*accelerator == at::kMPS) memory.insert_or_assign("mps", expect_known(available_in_system()));
      else
        memory.insert_or_assign(Place(static_cast<int64_t>(i)),
                                static_cast<double>(at::accelerator::getMemoryInfo(i).first));
    }
  }
  if (!memory.contains("mps"))  // with it both are the same memory
    memory.insert_or_assign("cpu", expect_known(available_memory()));
  return memory;
}

}  // namespace accelerate
