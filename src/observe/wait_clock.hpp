#pragma once

#include <chrono>
#include <utility>

#include "utils/run_counts.hpp"

namespace accelerate {

/// While it lives, this thread waits: the time goes to a count of nanoseconds. Within another one it adds nothing, so
/// that a loader that waits for other ranks waits for data only.
class WaitClock {
 public:
  /// @param counts  false: not this time
  explicit WaitClock(RunCount what, bool counts = true)
      : what_(what), counts_(counts && !std::exchange(running_, true)) {
    if (counts_) began_ = Clock::now();
  }
  ~WaitClock() {
    if (!counts_) return;
    running_ = false;
    counts::add(what_, std::chrono::nanoseconds(Clock::now() - began_).count());
  }
  WaitClock(const WaitClock&) = delete;
  WaitClock& operator=(const WaitClock&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  static inline thread_local bool running_ = false;  // NOLINT(readability-identifier-naming): a private member's
  RunCount what_;
  bool counts_;
  Clock::time_point began_;
};

}  // namespace accelerate
