#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "residency/home.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::residency {

/// One thread that reads and copies ahead of the computation, in the order asked for.
class Worker {
 public:
  Worker();
  ~Worker();
  /// `work` runs on the worker's thread, without autograd.
  std::unique_ptr<Transfer> run(std::function<void()> work);

 private:
  void loop();
  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::packaged_task<void()>> queue_ ACCELERATE_GUARDED_BY(mutex_);
  bool stop_ ACCELERATE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace accelerate::residency
