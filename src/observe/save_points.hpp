#pragma once

#include <atomic>
#include <functional>

/// Save points: places between two batches that all ranks come to in the same order, told to the one who may want to
/// save there. While nobody does, one costs an atomic load.
namespace accelerate::save_points {

class SavePointListener {
 public:
  virtual ~SavePointListener() = default;
  /// On the thread that asks a prepared loader for a batch, before the loader does anything.
  /// @param end_pass  makes of the pass that is under way one that is over; empty: a pass is about to begin
  virtual void pass(const std::function<void()>& end_pass) = 0;
};

namespace detail {
inline std::atomic<SavePointListener*> listener{nullptr};
}

template <class EndPass> void pass(EndPass&& end_pass) {
  if (auto* const heard = detail::listener.load(std::memory_order_acquire)) heard->pass(end_pass);
}

/// The name of a thread that a process has while it is to save and end: the launcher, which finds it in /proc, waits
/// for the process beyond its grace. The kernel allows 15 characters.
inline constexpr const char* kSavingThread = "saves-and-ends";

}  // namespace accelerate::save_points
