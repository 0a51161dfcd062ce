#include "utils/counts.hpp"

namespace accelerate::counts {

constinit std::array<std::atomic<int64_t>, kCounts> values{};

void reset() {
  for (auto& count : values) count.store(0, std::memory_order_relaxed);
}

}  // namespace accelerate::counts
