#include "residency/worker.hpp"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/util/thread_name.h>

namespace accelerate::residency {
namespace {

class Running final : public Transfer {
 public:
  explicit Running(std::future<void> done) : done_(std::move(done)) {}
  ~Running() override {
    if (done_.valid()) done_.wait();
  }
  void wait() override { done_.get(); }

 private:
  std::future<void> done_;
};

}  // namespace

Worker::Worker() : thread_([this] { loop(); }) {}

Worker::~Worker() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::unique_ptr<Transfer> Worker::run(std::function<void()> work) {
  std::packaged_task<void()> task(std::move(work));
  auto transfer = std::make_unique<Running>(task.get_future());
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(task));
  }
  changed_.notify_one();
  return transfer;
}

void Worker::loop() {
  c10::setThreadName("acc_fetch");
  c10::AutoGradMode no_grad(false);
  at::set_num_threads(1);  // the computation has the cores
  for (;;) {
    std::packaged_task<void()> task;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    task();
  }
}

}  // namespace accelerate::residency
