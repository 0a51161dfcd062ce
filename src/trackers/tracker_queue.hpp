#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "trackers/record.hpp"

namespace accelerate {

/// A tracker behind a bounded queue, with a thread that writes. Whoever logs waits for nothing but a mutex that is
/// never held while something is written.
class TrackerQueue {
 public:
  struct Entry {
    Record record;
    TrackerValues log_kwargs;
  };
  struct Limits {
    size_t records = size_t{1} << 17;
    size_t bytes = size_t{64} << 20;
    /// How long the thread lets records gather. A quick tracker's are on their way out of the process after so long.
    std::chrono::milliseconds delay{200};
  };
  /// Told what the tracker did not take (null: it is about no record) and why: there was no room, it threw, it is gone,
  /// it did not end in time. By any thread.
  using Refused = std::function<void(const Entry*, const std::string& reason)>;

  /// `tracker` has been started.
  TrackerQueue(std::shared_ptr<GeneralTracker> tracker, Refused refused, const Limits& limits);
  /// Does as finish(), in no time.
  ~TrackerQueue();
  TrackerQueue(const TrackerQueue&) = delete;
  TrackerQueue& operator=(const TrackerQueue&) = delete;

  /// Returns at once. Any thread.
  /// @return false: the queue has been finished, and takes nothing
  bool push(Entry entry);
  /// Waits until all is written and flushed that was pushed before. Any thread.
  /// @return false: it was not in that time
  bool flush(std::chrono::milliseconds time);
  /// Has all written, ends the tracker and its thread. Records that are not written in that time are refused, and the
  /// thread is left to itself, with the tracker. A second call does nothing.
  /// @return false: so it was
  bool finish(std::chrono::milliseconds time);

 private:
  struct Shared;
  static void run(Shared& shared);

  std::shared_ptr<Shared> shared_;  ///< with the thread, which may outlive the queue
  std::thread writer_;
};

}  // namespace accelerate
