#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace accelerate::comm {

class Group;

/// Memory that all ranks of a group map, where all of them run on one host and compute on the CPU. It has no name: the
/// kernel frees it with the last process, however that ends. Begins zeroed; the first `kHeader` bytes are the
/// barrier's.
class SharedMemory {
 public:
  /// Collective. Null on all ranks when they are not on one host, when ACCELERATE_SHARED_MEMORY=0 says so on any rank,
  /// or when the memory can't be had (rank 0 warns and says why).
  /// @param bytes   the same on all ranks. Memory is taken page by page, when a page is first written to.
  /// @param likely  how many of them will be written to; so many must be free now. All, if it is not given.
  static std::shared_ptr<SharedMemory> create(const std::shared_ptr<Group>& group, size_t bytes,
                                              std::optional<size_t> likely = std::nullopt);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// `bytes` of them, aligned to a page.
  char* data() const { return base_ + kHeader; }

  /// Waits for all ranks, microseconds after the last one has come. Collective. @throws CommError as every wait of the
  /// group.
  void barrier(const char* operation);

 private:
  static constexpr size_t kHeader = 4096;
  struct alignas(64) Arrival {
    std::atomic<uint64_t> count;
  };
  SharedMemory(std::shared_ptr<Group> group, char* base, size_t length)
      : group_(std::move(group)), base_(base), length_(length) {}
  Arrival* arrivals() const { return reinterpret_cast<Arrival*>(base_); }

  std::shared_ptr<Group> group_;
  char* base_;
  size_t length_;
  uint64_t barriers_ = 0;
};

}  // namespace accelerate::comm
