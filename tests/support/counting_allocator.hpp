#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

/// How many bytes CPU tensors hold, seen from below: an allocator that keeps two numbers.
namespace support {

class CountingAllocator final : public c10::Allocator {
 public:
  /// Counts all CPU tensors that are made from now on, until the program ends.
  static CountingAllocator& install() {
    static auto* allocator = [] {
      auto* made = new CountingAllocator;
      c10::SetCPUAllocator(made, /*priority=*/255);
      return made;
    }();
    return *allocator;
  }

  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }
  void reset_peak() { peak_ = live_.load(); }

  c10::DataPtr allocate(size_t bytes) override {
    // oneDNN's allocations want the context to be the address, so the size lies in front of the data.
    auto* block =
        static_cast<std::byte*>(std::aligned_alloc(kAlignment, (bytes + 2 * kAlignment - 1) / kAlignment * kAlignment));
    if (!block) throw std::bad_alloc();
    std::memcpy(block, &bytes, sizeof(bytes));
    const auto now = live_ += static_cast<int64_t>(bytes);
    for (auto peak = peak_.load(); peak < now && !peak_.compare_exchange_weak(peak, now);) {
    }
    return {block + kAlignment, block + kAlignment, &CountingAllocator::release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &CountingAllocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static constexpr size_t kAlignment = 64;
  static void release(void* data) {
    auto* block = static_cast<std::byte*>(data) - kAlignment;
    size_t bytes = 0;
    std::memcpy(&bytes, block, sizeof(bytes));
    install().live_ -= static_cast<int64_t>(bytes);
    std::free(block);
  }
  std::atomic<int64_t> live_{0}, peak_{0};
};

}  // namespace support
