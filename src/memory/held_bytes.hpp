#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace accelerate {

/// The uses of bytes that no tensor of the program's shows, over the whole process; memory() reads them.
enum class HeldFor : size_t {
  offloaded_host,  ///< copies of units in the host's memory
  offloaded_file,  ///< units that are read from files
  communication,   ///< buckets of gradients, and buffers kept for the next units or gradients
  number_of_uses
};

/// Bytes held by its owner. One thread at a time; reading is for any.
class HeldBytes {
 public:
  explicit HeldBytes(HeldFor use, int64_t bytes = 0) : use_(use) { add(bytes); }
  HeldBytes(const HeldBytes&) = delete;
  HeldBytes& operator=(const HeldBytes&) = delete;
  ~HeldBytes() { add(-bytes_); }

  void add(int64_t bytes) {
    bytes_ += bytes;
    total(use_).fetch_add(bytes, std::memory_order_relaxed);
  }
  int64_t bytes() const { return bytes_; }

  static int64_t of_process(HeldFor use) { return total(use).load(std::memory_order_relaxed); }

 private:
  static std::atomic<int64_t>& total(HeldFor use) {
    static std::array<std::atomic<int64_t>, static_cast<size_t>(HeldFor::number_of_uses)> totals{};
    return totals[static_cast<size_t>(use)];
  }

  HeldFor use_;
  int64_t bytes_ = 0;
};

}  // namespace accelerate
