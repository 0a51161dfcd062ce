#pragma once

/// Which mutex guards what, in a form that Clang checks (-Wthread-safety): a member that is read without its mutex, a
/// function that is called without the lock that it needs, is an error there. Other compilers read past it.
///
///     mutable Mutex mutex_;
///     int64_t count_ ACCELERATE_GUARDED_BY(mutex_) = 0;
///     void add_one() ACCELERATE_REQUIRES(mutex_);
///
/// A lambda is a function of its own to the check, which does not see there that the lock is held. So conditions are
/// waited for in a loop, `while (!ready_) lock.wait(changed_);`, and other lambdas say it (assert_held).
/// Source: https://clang.llvm.org/docs/ThreadSafetyAnalysis.html

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define ACCELERATE_THREAD_ANNOTATION(attribute) __attribute__((attribute))
#else
#define ACCELERATE_THREAD_ANNOTATION(attribute)
#endif

/// For a member: read and written with the mutex held.
#define ACCELERATE_GUARDED_BY(mutex) ACCELERATE_THREAD_ANNOTATION(guarded_by(mutex))
/// For a function: the caller holds the mutex.
#define ACCELERATE_REQUIRES(...) ACCELERATE_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
/// For a function: the caller does not hold the mutex, which the function takes.
#define ACCELERATE_EXCLUDES(...) ACCELERATE_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))

namespace accelerate {

class ACCELERATE_THREAD_ANNOTATION(capability("mutex")) Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;
  void lock() ACCELERATE_THREAD_ANNOTATION(acquire_capability()) { mutex_.lock(); }
  void unlock() ACCELERATE_THREAD_ANNOTATION(release_capability()) { mutex_.unlock(); }
  bool try_lock() ACCELERATE_THREAD_ANNOTATION(try_acquire_capability(true)) { return mutex_.try_lock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

/// Holds a Mutex for a scope, and may let go of it in between.
class ACCELERATE_THREAD_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACCELERATE_THREAD_ANNOTATION(acquire_capability(mutex)) : lock_(mutex.mutex_) {}
  /// The caller has locked it already, by try_lock().
  MutexLock(Mutex& mutex, std::adopt_lock_t adopt) ACCELERATE_REQUIRES(mutex) : lock_(mutex.mutex_, adopt) {}
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  // A defaulted one takes no annotation. NOLINTNEXTLINE(modernize-use-equals-default)
  ~MutexLock() ACCELERATE_THREAD_ANNOTATION(release_capability()) {}

  void lock() ACCELERATE_THREAD_ANNOTATION(acquire_capability()) { lock_.lock(); }
  void unlock() ACCELERATE_THREAD_ANNOTATION(release_capability()) { lock_.unlock(); }
  /// Until somebody notifies, or without a reason; the mutex is held again afterwards.
  void wait(std::condition_variable& changed) { changed.wait(lock_); }
  template <class Rep, class Period>
  void wait_for(std::condition_variable& changed, std::chrono::duration<Rep, Period> time) {
    changed.wait_for(lock_, time);
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

/// One that its holder may lock again.
class ACCELERATE_THREAD_ANNOTATION(capability("mutex")) RecursiveMutex {
 public:
  RecursiveMutex() = default;
  RecursiveMutex(const RecursiveMutex&) = delete;
  RecursiveMutex& operator=(const RecursiveMutex&) = delete;
  void lock() ACCELERATE_THREAD_ANNOTATION(acquire_capability()) { mutex_.lock(); }
  void unlock() ACCELERATE_THREAD_ANNOTATION(release_capability()) { mutex_.unlock(); }
  /// Does nothing: in a lambda, tells the check that whoever calls it holds the mutex.
  void assert_held() const ACCELERATE_THREAD_ANNOTATION(assert_capability(this)) {}

 private:
  std::recursive_mutex mutex_;
};

class ACCELERATE_THREAD_ANNOTATION(scoped_lockable) RecursiveMutexLock {
 public:
  explicit RecursiveMutexLock(RecursiveMutex& mutex) ACCELERATE_THREAD_ANNOTATION(acquire_capability(mutex))
      : mutex_(mutex) {
    mutex_.lock();
  }
  RecursiveMutexLock(const RecursiveMutexLock&) = delete;
  RecursiveMutexLock& operator=(const RecursiveMutexLock&) = delete;
  ~RecursiveMutexLock() ACCELERATE_THREAD_ANNOTATION(release_capability()) { mutex_.unlock(); }

 private:
  RecursiveMutex& mutex_;
};

}  // namespace accelerate
