#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "residency/home.hpp"
#include "residency/worker.hpp"

namespace accelerate::residency {

/// How transfers are cut into requests, and how many of these are on their way. The `aio` section of DeepSpeed's
/// configuration.
struct DiskRequests {
  static constexpr int64_t kBlock = 4096;  ///< what direct transfers are multiples of, in the file and in memory

  int64_t bytes = 1 << 20;      ///< of one; a multiple of kBlock
  int64_t depth = 8;            ///< on their way at a time, of each thread
  int64_t threads = 1;          ///< each moves an equal part of a transfer
  bool one_by_one = false;      ///< the system is told of each by itself
  bool refills_at_once = true;  ///< the next one begins when any has ended; false: when all have
};

/// Moves bytes between memory and a file past the system's cache of files, by io_uring where the kernel lets it and
/// by plain calls elsewhere. Reads don't wait for writes.
class DirectIo {
 public:
  explicit DirectIo(const DiskRequests& requests) : requests_(requests) {}

  /// Multiples of DiskRequests::kBlock, all three.
  struct Range {
    int64_t offset;  ///< in the file
    char* data;
    int64_t bytes;
  };
  /// In the background; `file` and the memory must live as long as the transfer, whose wait() @throws
  /// std::system_error.
  std::unique_ptr<Transfer> read(int file, std::vector<Range> ranges);
  std::unique_ptr<Transfer> write(int file, std::vector<Range> ranges);

  /// Of bytes that have no such memory: each request is read into some of the calling thread's, `requests.depth` of
  /// them, and given to `take` as it has come, in any order. Blocks; `requests.threads` says nothing here.
  /// @param offset, bytes  multiples of DiskRequests::kBlock @throws std::system_error, also at the file's end
  static void read_by_requests(int file, int64_t offset, int64_t bytes, const DiskRequests& requests,
                               const std::function<void(int64_t offset, const char* data, int64_t bytes)>& take);

 private:
  std::unique_ptr<Transfer> start(bool writes, int file, std::vector<Range> ranges);
  DiskRequests requests_;
  std::vector<std::shared_ptr<Worker>> readers_, writers_;  ///< made when they are needed
};

}  // namespace accelerate::residency
