#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The bytes that LibTorch's allocator of one device has. Zeros until something has been allocated there.
struct DeviceMemory {
  std::string device;          ///< "cuda:0"
  int64_t allocated = 0;       ///< in tensors, now
  int64_t peak_allocated = 0;  ///< the most so far, or since reset_peak_memory()
  int64_t reserved = 0;        ///< taken from the device: also what is kept for later tensors
  int64_t peak_reserved = 0;
  int64_t free = 0;  ///< of the device, whoever uses it; 0 where its driver doesn't say
  int64_t total = 0;
};

/// The bytes that an Accelerator's prepared objects hold, each storage once; of sharded tensors this rank's shard.
struct ModelMemory {
  int64_t parameters = 0;  ///< and buffers; not what MemorySnapshot::gathered or offloaded_* count
  int64_t gradients = 0;   ///< of these
  int64_t optimizer = 0;   ///< states of optimizers of LibTorch's classes
  int64_t on_host = 0;     ///< of all three, in the host's memory: all of them on the CPU
};

/// Memory of this process at one moment, in bytes. On the CPU, where LibTorch's allocator counts nothing, the kernel's
/// numbers stand for it.
struct MemorySnapshot {
  int64_t resident = 0;        ///< of the process in the host's memory (VmRSS)
  int64_t peak_resident = 0;   ///< the most so far, or since reset_peak_memory() (VmHWM)
  int64_t host_total = 0;      ///< of the machine
  int64_t host_available = 0;  ///< for whoever asks first, without swapping
  int64_t gathered = 0;        ///< of it, or of the devices': whole parameters that are present of models which are
                               ///< sharded or offloaded
  int64_t peak_gathered = 0;
  int64_t offloaded_host = 0;         ///< of models that a device map spread: copies in the host's memory
  int64_t offloaded_file = 0;         ///< units that are read from files when they are used
  int64_t communication = 0;          ///< buckets that gradients travel in (with gradient_as_bucket_view they are the
                                      ///< gradients), and whole units' buffers kept for the next ones
  std::optional<ModelMemory> models;  ///< from Accelerator::memory() only
  std::vector<DeviceMemory> devices;  ///< that LibTorch can use; none on the CPU

  /// For people, a line for the host, one for what it is used for, and one for each device.
  std::string text() const;
};

/// Not collective; any thread. Reads three small files of /proc and asks each device's allocator: some 50 microseconds.
/// @throws ResourceError where there is no /proc.
ACCELERATE_API MemorySnapshot memory();
/// The peaks start again at what is in use now. The kernel may refuse it for the host's, which then stays. Not
/// collective.
ACCELERATE_API void reset_peak_memory();

}  // namespace accelerate
