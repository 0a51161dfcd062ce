#include "trackers/tracker_queue.hpp"

#include <condition_variable>
#include <deque>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "utils/thread_annotations.hpp"

namespace accelerate {
namespace {
using Clock = std::chrono::steady_clock;
constexpr const char* kNoException = "it threw something that is no std::exception";
}  // namespace

struct TrackerQueue::Shared {
  Shared(std::shared_ptr<GeneralTracker> tracker, Refused refused, const Limits& limits)
      : tracker(std::move(tracker)), refused(std::move(refused)), limits(limits) {}

  const std::shared_ptr<GeneralTracker> tracker;
  const Refused refused;
  const Limits limits;

  Mutex mutex;
  std::condition_variable woken;     ///< for the thread: there is something to do
  std::condition_variable advanced;  ///< for those who wait: it has done something
  /// Entries that are not written yet; the first one may be on its way.
  std::deque<Entry> entries ACCELERATE_GUARDED_BY(mutex);
  size_t bytes ACCELERATE_GUARDED_BY(mutex) = 0;
  int64_t pushed ACCELERATE_GUARDED_BY(mutex) = 0;
  int64_t flushed ACCELERATE_GUARDED_BY(mutex) = 0;   ///< of those pushed, whatever has become of them
  int64_t hurry_to ACCELERATE_GUARDED_BY(mutex) = 0;  ///< somebody waits until so many are flushed
  bool idle ACCELERATE_GUARDED_BY(mutex) = false;     ///< the thread waits for the first record
  bool closing ACCELERATE_GUARDED_BY(mutex) = false;
  bool abandoned ACCELERATE_GUARDED_BY(mutex) = false;
  bool ended ACCELERATE_GUARDED_BY(mutex) = false;

  bool half_full() const ACCELERATE_REQUIRES(mutex) {
    return entries.size() * 2 >= limits.records || bytes * 2 >= limits.bytes;
  }

  /// Entries that the tracker has taken since it was last flushed: they may still be in its hands.
  std::vector<Entry> unflushed ACCELERATE_GUARDED_BY(mutex);

  // The thread's own.
  std::optional<std::string> gone;  ///< why there is no use in trying
  Clock::time_point last_flush = Clock::now();

  std::vector<Entry> take_unflushed() {
    const MutexLock lock(mutex);
    return std::exchange(unflushed, {});
  }
  /// Tells of what went wrong. It concerns the record, if there is one, and what is not flushed, unless it is of that
  /// record alone.
  void fail(const Entry* entry, const std::string& reason) {
    const auto lost = entry && !gone ? std::vector<Entry>{} : take_unflushed();
    for (const auto& one : lost) refused(&one, reason);
    if (entry || lost.empty()) refused(entry, reason);
  }
  /// Runs `f` for a record, or for none. @return false: it threw
  template <class F> bool attempt(const Entry* entry, F&& f) {
    try {
      f();
      return true;
    } catch (const TrackerGone& error) {
      gone = error.what();
      fail(entry, *gone);
    } catch (const std::exception& error) {
      fail(entry, error.what());
    } catch (...) {
      fail(entry, kNoException);
    }
    return false;
  }
  bool write(const Entry& entry) {
    if (gone) {
      refused(&entry, *gone);
      return false;
    }
    return attempt(&entry, [&] {
      tracker->set_time(entry.record->time);
      entry.record->write(*tracker, entry.log_kwargs);
    });
  }
  void flush() {
    if (!gone && attempt(nullptr, [&] { tracker->flush(); })) take_unflushed();
    last_flush = Clock::now();
  }
};

void TrackerQueue::run(Shared& shared) {
  try {
    shared.tracker->connect();
  } catch (const std::exception& error) {
    shared.gone = error.what();
  } catch (...) {
    shared.gone = kNoException;
  }

  MutexLock lock(shared.mutex);
  while (!shared.abandoned) {
    while (shared.entries.empty() && !shared.closing) {
      shared.idle = true;
      lock.wait(shared.woken);
    }
    shared.idle = false;
    if (shared.entries.empty()) break;
    const auto until = Clock::now() + shared.limits.delay;
    for (auto now = Clock::now();
         now < until && !shared.closing && shared.hurry_to <= shared.flushed && !shared.half_full(); now = Clock::now())
      lock.wait_for(shared.woken, until - now);

    int64_t written = shared.flushed;
    while (!shared.entries.empty() && !shared.abandoned) {
      const Entry entry = shared.entries.front();  // a copy: finish() may take the queue away
      lock.unlock();
      const bool taken = shared.write(entry);
      lock.lock();
      if (shared.abandoned) return;
      shared.bytes -= entry.record->bytes;
      shared.entries.pop_front();
      if (taken) shared.unflushed.push_back(entry);
      ++written;
      if (Clock::now() - shared.last_flush <= shared.limits.delay) continue;
      lock.unlock();
      shared.flush();
      lock.lock();
    }
    lock.unlock();
    shared.flush();
    lock.lock();
    shared.flushed = written;
    shared.advanced.notify_all();
  }
  if (shared.abandoned) return;
  lock.unlock();
  if (!shared.gone) shared.attempt(nullptr, [&] { shared.tracker->finish(); });
  lock.lock();
  shared.ended = true;
  shared.advanced.notify_all();
}

TrackerQueue::TrackerQueue(std::shared_ptr<GeneralTracker> tracker, Refused refused, const Limits& limits)
    : shared_(std::make_shared<Shared>(std::move(tracker), std::move(refused), limits)),
      writer_([shared = shared_] { run(*shared); }) {}

TrackerQueue::~TrackerQueue() { finish(std::chrono::milliseconds(0)); }

bool TrackerQueue::push(Entry entry) {
  MutexLock lock(shared_->mutex);
  if (shared_->closing) return false;
  const size_t bytes = entry.record->bytes;
  // A record that is larger than the whole queue goes alone.
  if (shared_->entries.size() >= shared_->limits.records ||
      (shared_->bytes > 0 && shared_->bytes + bytes > shared_->limits.bytes)) {
    lock.unlock();
    shared_->refused(&entry, "it does not keep up with what is logged");
    return true;
  }
  shared_->bytes += bytes;
  shared_->entries.push_back(std::move(entry));
  ++shared_->pushed;
  if (shared_->idle || shared_->half_full()) {
    shared_->idle = false;
    shared_->woken.notify_one();
  }
  return true;
}

bool TrackerQueue::flush(std::chrono::milliseconds time) {
  const auto until = Clock::now() + time;
  MutexLock lock(shared_->mutex);
  const int64_t target = shared_->pushed;
  shared_->hurry_to = std::max(shared_->hurry_to, target);
  shared_->woken.notify_one();
  while (shared_->flushed < target && !shared_->ended && !shared_->abandoned) {
    const auto now = Clock::now();
    if (now >= until) return false;
    lock.wait_for(shared_->advanced, until - now);
  }
  return !shared_->abandoned;
}

bool TrackerQueue::finish(std::chrono::milliseconds time) {
  if (!writer_.joinable()) return true;
  const auto until = Clock::now() + time;
  std::deque<Entry> left;
  MutexLock lock(shared_->mutex);
  shared_->closing = true;
  shared_->woken.notify_one();
  for (auto now = Clock::now(); !shared_->ended && now < until; now = Clock::now())
    lock.wait_for(shared_->advanced, until - now);
  if (shared_->ended) {
    lock.unlock();
    writer_.join();
    return true;
  }
  shared_->abandoned = true;
  left.swap(shared_->entries);
  left.insert(left.begin(), shared_->unflushed.begin(), shared_->unflushed.end());
  shared_->unflushed.clear();
  shared_->bytes = 0;
  shared_->advanced.notify_all();
  lock.unlock();
  writer_.detach();
  const std::string reason = "it did not end in time";
  if (left.empty()) shared_->refused(nullptr, reason);
  for (const auto& entry : left) shared_->refused(&entry, reason);
  return false;
}

}  // namespace accelerate
