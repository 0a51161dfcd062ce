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

#include "accelerate/data/batch_ops.hpp"
#include "worker_pool.hpp"

namespace accelerate::data::detail {

/// The source of a prepared loader's batches.
class Feed {
 public:
  virtual ~Feed() = default;
  /// The next batch, or nothing at the end. Blocks until it is there. @throws what reading it threw, in the reader or
  /// in a worker.
  virtual std::optional<LoadedBatch> next() = 0;
};

/// Batches in order. Used by one thread; abandoning it in the middle leaves at most the batches that are being read to
/// finish.
class Pass final : public Feed {
 public:
  /// Reads one batch; nothing at the end of a source that does not know its end beforehand.
  using Read = std::function<std::optional<LoadedBatch>()>;

  /// @param next_read  called on the consumer's thread; gives the next thing to read, or an empty function at the end
  /// @param pool       null: read when asked
  /// @param ahead      how many batches the pool reads ahead
  Pass(std::function<Read()> next_read, std::shared_ptr<WorkerPool> pool, int64_t ahead)
      : next_read_(std::move(next_read)), pool_(std::move(pool)), ahead_(static_cast<size_t>(ahead)) {}
  ~Pass() override { *cancelled_ = true; }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;

  std::optional<LoadedBatch> next() override;

 private:
  /// Gives the pool as much to do as may be ahead.
  void fill();

  std::function<Read()> next_read_;
  std::shared_ptr<WorkerPool> pool_;
  size_t ahead_;
  bool done_ = false;
  std::deque<std::future<std::optional<LoadedBatch>>> waiting_;
  std::shared_ptr<std::atomic<bool>> cancelled_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace accelerate::data::detail
