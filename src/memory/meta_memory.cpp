#include "memory/meta_memory.hpp"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <numeric>
#include <utility>

namespace accelerate {

const char* to_string(MemoryUse use) {
  switch (use) {
    case MemoryUse::parameters:
      return "parameters";
    case MemoryUse::gradients:
      return "gradients";
    case MemoryUse::optimizer:
      return "optimizer";
    case MemoryUse::gathered:
      return "gathered";
    case MemoryUse::staging:
      return "staging";
    case MemoryUse::other:
      return "other";
  }
  return "?";
}

int64_t MemoryByUse::total() const { return std::accumulate(bytes.begin(), bytes.end(), int64_t{0}); }

}  // namespace accelerate

namespace accelerate::meta_memory {
namespace {

constexpr int kNone = -1;
thread_local int current_use = static_cast<int>(MemoryUse::other);

using Bytes = decltype(MemoryByUse::bytes);

/// Outlives all tensors, some of which may outlive the meter that saw them begin.
struct MemoryCount {
  std::mutex mutex;
  Bytes now{}, at_peak{}, peaks{};
  int64_t peak = 0;

  void add(int use, int64_t bytes) {
    const std::lock_guard lock(mutex);
    const auto i = static_cast<size_t>(use);
    now[i] += bytes;
    peaks[i] = std::max(peaks[i], now[i]);
    if (const int64_t all = MemoryByUse{now}.total(); all > peak) peak = all, at_peak = now;
  }
};

MemoryCount& count() {
  static auto* instance = new MemoryCount;
  return *instance;
}

struct MetaAllocation {
  int use;
  int64_t bytes;
};

void end_of_allocation(void* context) {
  const auto* allocation = static_cast<MetaAllocation*>(context);
  count().add(allocation->use, -allocation->bytes);
  delete allocation;
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (current_use == kNone || bytes == 0) return {nullptr, c10::Device(c10::kMeta)};
    auto* allocation = new MetaAllocation{.use = current_use, .bytes = static_cast<int64_t>(bytes)};
    count().add(allocation->use, allocation->bytes);
    return {nullptr, allocation, &end_of_allocation, c10::Device(c10::kMeta)};
  }
  void copy_data(void*, const void*, std::size_t) const override {}
};

CountingAllocator& allocator() {
  static auto* instance = new CountingAllocator;
  return *instance;
}

c10::Allocator* previous = nullptr;

}  // namespace

Purpose::Purpose(MemoryUse use) : before_(std::exchange(current_use, static_cast<int>(use))) {}
Purpose::~Purpose() { current_use = before_; }

Uncounted::Uncounted() : before_(std::exchange(current_use, kNone)) {}
Uncounted::~Uncounted() { current_use = before_; }

Meter::Meter() {
  MemoryCount& c = count();
  const std::lock_guard lock(c.mutex);
  c.now = c.at_peak = c.peaks = Bytes{};
  c.peak = 0;
  previous = c10::GetAllocator(c10::kMeta);
  c10::SetAllocator(c10::kMeta, &allocator());
}

Meter::~Meter() { c10::SetAllocator(c10::kMeta, previous); }

Meter::Reading Meter::read() {
  MemoryCount& c = count();
  const std::lock_guard lock(c.mutex);
  const Reading reading{.now = {c.now}, .at_peak = {c.at_peak}, .peaks = {c.peaks}};
  c.at_peak = c.peaks = c.now;
  c.peak = reading.now.total();
  return reading;
}

}  // namespace accelerate::meta_memory
