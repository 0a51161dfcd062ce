#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace accelerate::data::detail {

/// Threads that run tasks in the order in which they came. The destructor drops tasks that have not begun and waits for
/// those that have.
class WorkerPool {
 public:
  explicit WorkerPool(int64_t num_threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;
  void submit(std::function<void()> task);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate::data::detail
