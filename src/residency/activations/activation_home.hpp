#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>

namespace accelerate::residency {

/// Bytes that were moved away. Used by one thread at a time, and only when the original's memory is gone (until then
/// the copy may not be complete); destroyed anywhere.
class AwayBytes {
 public:
  virtual ~AwayBytes() = default;
  /// Starts to bring them back, without waiting, unless that has begun already.
  virtual void prefetch() = 0;
  /// Whether prefetch() was called since the last fetch().
  virtual bool started() const = 0;
  /// They, on the device where they were: [n] uint8. Waits, or starts a transfer and makes the current stream wait.
  virtual at::Tensor fetch() = 0;
};

/// The home of activations. Thread-safe.
class ActivationHome {
 public:
  virtual ~ActivationHome() = default;
  /// Starts to move `bytes` ([n] uint8, contiguous) and returns; the tensor is let go when the copy is done. Nobody
  /// writes to it until then.
  virtual std::unique_ptr<AwayBytes> store(at::Tensor bytes) = 0;
};

/// Host memory for an accelerator's tensors; transfers run on a stream of their own.
std::unique_ptr<ActivationHome> make_host_home(bool pin_memory);
/// A file without a name in `directory`; transfers run on a thread of their own. @throws ConfigError, ResourceError
std::unique_ptr<ActivationHome> make_disk_home(const std::filesystem::path& directory, int64_t max_pending_bytes);

}  // namespace accelerate::residency
