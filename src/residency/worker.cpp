#include "residency/worker.hpp"

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/util/thread_name.h>

#include <latch>

#include "observe/trace.hpp"

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

Worker::Worker() {
  // The computation has the cores, so the worker does with one. LibTorch takes that also for the count of every thread
  // that has not computed yet, which may be the one that computes the model: hence the old count is put back, by
  // another thread than the worker.
  const int threads = at::get_num_threads();
  std::latch alone(1);
  thread_ = std::thread([this, &alone] {
    at::set_num_threads(1);
    static_cast<void>(at::get_num_threads());  // a thread's first question settles its count
    alone.count_down();
    loop();
  });
  alone.wait();
  at::set_num_threads(threads);
}

Worker::~Worker() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::unique_ptr<Transfer> Worker::run(std::function<void()> work) {
  if (auto label = trace::label_of("work", 0))
    work = [label = std::move(label), work = std::move(work)] {
      const trace::Span span(label, trace::Lane::thread);
      work();
    };
  std::packaged_task<void()> task(std::move(work));
  auto transfer = std::make_unique<Running>(task.get_future());
  {
    const MutexLock lock(mutex_);
    queue_.push_back(std::move(task));
  }
  changed_.notify_one();
  return transfer;
}

void Worker::loop() {
  c10::setThreadName("acc_fetch");
  c10::AutoGradMode no_grad(false);
  for (;;) {
    std::packaged_task<void()> task;
    {
      MutexLock lock(mutex_);
      while (!stop_ && queue_.empty()) lock.wait(changed_);
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    task();
  }
}

}  // namespace accelerate::residency
