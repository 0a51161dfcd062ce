#include "worker_pool.hpp"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace accelerate::data::detail {

struct WorkerPool::Impl {
  std::mutex mutex;
  std::condition_variable ready;
  std::deque<std::function<void()>> tasks;
  bool stopping = false;
  std::vector<std::thread> threads;

  void work() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex);
        ready.wait(lock, [this] { return stopping || !tasks.empty(); });
        if (stopping) return;
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      task();
    }
  }
};

WorkerPool::WorkerPool(int64_t num_threads) : impl_(std::make_unique<Impl>()) {
  for (int64_t i = 0; i < num_threads; ++i) impl_->threads.emplace_back([impl = impl_.get()] { impl->work(); });
}

WorkerPool::~WorkerPool() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->ready.notify_all();
  for (auto& thread : impl_->threads) thread.join();
}

void WorkerPool::submit(std::function<void()> task) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->tasks.push_back(std::move(task));
  }
  impl_->ready.notify_one();
}

}  // namespace accelerate::data::detail
