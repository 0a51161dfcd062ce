#pragma once

/// One pass over a source of batches: read inline, or ahead by worker threads with the order kept.

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <utility>

#include "accelerate/utils/export.hpp"

namespace accelerate::data::detail {

/// Threads that run tasks in the order in which they came. The destructor drops tasks that have not begun and waits for
/// those that have.
class ACCELERATE_API WorkerPool {
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

/// What one step read.
template <class Batch> struct Part {
  Batch batch;
  /// What LoaderStatus::remainder() is when this is the last one; unset: what the sizes say.
  std::optional<int64_t> remainder;
};

/// Batches in order. Used by one thread; abandoning it in the middle leaves at most the batches that are being read to
/// finish.
template <class Batch> class Pass {
 public:
  /// Reads one part; nothing at the end of a source that does not know its end beforehand.
  using Read = std::function<std::optional<Part<Batch>>()>;

  /// @param next_read  called on the consumer's thread; gives the next thing to read, or an empty function at the end
  /// @param pool       null: read when asked
  /// @param ahead      how many parts the pool reads ahead
  Pass(std::function<Read()> next_read, std::shared_ptr<WorkerPool> pool, int64_t ahead)
      : next_read_(std::move(next_read)), pool_(std::move(pool)), ahead_(static_cast<size_t>(ahead)) {}
  ~Pass() { *cancelled_ = true; }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  /// The next part, or nothing at the end. Blocks until it is there. @throws what reading it threw, in the reader or in
  /// a worker.
  std::optional<Part<Batch>> next() {
    if (!pool_) {
      const Read read = done_ ? Read() : next_read_();
      auto part = read ? read() : std::nullopt;
      done_ = !part;
      return part;
    }
    while (!done_ && waiting_.size() < ahead_) {
      Read read = next_read_();
      if (!read) {
        done_ = true;
        break;
      }
      auto task = std::make_shared<std::packaged_task<std::optional<Part<Batch>>()>>(
          [read = std::move(read), cancelled = cancelled_]() -> std::optional<Part<Batch>> {
            return *cancelled ? std::nullopt : read();
          });
      waiting_.push_back(task->get_future());
      pool_->submit([task = std::move(task)] { (*task)(); });
    }
    if (waiting_.empty()) return std::nullopt;
    auto future = std::move(waiting_.front());
    waiting_.pop_front();
    auto part = future.get();
    if (!part) {
      done_ = true;
      waiting_.clear();
    }
    return part;
  }

 private:
  std::function<Read()> next_read_;
  std::shared_ptr<WorkerPool> pool_;
  size_t ahead_;
  bool done_ = false;
  std::deque<std::future<std::optional<Part<Batch>>>> waiting_;
  std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace accelerate::data::detail
