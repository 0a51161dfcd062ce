#pragma once

#include <accelerate/trackers/memory_tracker.hpp>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

namespace support {

/// A tracker that misbehaves on demand.
struct StubbornTracker : accelerate::MemoryTracker {
  std::string called = "stubborn";
  std::atomic<bool> holds = false;   ///< log() waits while it is set
  std::atomic<bool> inside = false;  ///< log() has been called
  std::atomic<bool> hangs_at_end = false, flush_fails = false;
  std::string refuses;  ///< a value: with this name throws
  std::string goes_at;  ///< a value: with this name there is no going on
  bool every_process = false, connects = true;
  std::atomic<int64_t> flushes = 0;
  std::atomic<int64_t> taken = 0;  ///< rows, for those who have not waited for the thread

  std::string name() const override { return called; }
  bool main_process_only() const override { return !every_process; }
  void connect() override {
    if (!connects) throw std::runtime_error("no server answers");
  }
  void wait(const std::atomic<bool>& while_set) const {
    while (while_set) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  void log(const accelerate::TrackerValues& values, std::optional<int64_t> step,
           const accelerate::TrackerValues& log_kwargs = {}) override {
    inside = true;
    wait(holds);
    if (values.contains(refuses)) throw std::runtime_error("it does not like " + refuses);
    if (values.contains(goes_at)) throw accelerate::TrackerGone("its program has died");
    MemoryTracker::log(values, step, log_kwargs);
    ++taken;
  }
  void flush() override {
    ++flushes;
    if (flush_fails.exchange(false)) throw std::runtime_error("the disk is full");
  }
  void finish() override {
    wait(hangs_at_end);
    MemoryTracker::finish();
  }
};

}  // namespace support
