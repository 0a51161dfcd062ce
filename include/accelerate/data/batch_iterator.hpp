#pragma once

/// How `for (auto& batch : loader)` moves on.

#include <cstddef>
#include <iterator>
#include <memory>
#include <utility>

#include "accelerate/data/batch_ops.hpp"

namespace accelerate::data {
namespace detail {

/// A position in a pass. Owns the batch that the loop body sees.
class BatchCursor {
 public:
  virtual ~BatchCursor() = default;
  /// Reads on. The batch is good until the next call; null: the end. Blocks until it is there. @throws what reading it
  /// threw.
  virtual const AnyBatch* next() = 0;
};

}  // namespace detail

/// Input iterator over the batches of a pass. Copies share one position.
template <class Batch> class BatchIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;
  using pointer = Batch*;
  using reference = Batch&;

  BatchIterator() = default;
  explicit BatchIterator(std::shared_ptr<detail::BatchCursor> cursor) : cursor_(std::move(cursor)) { ++*this; }
  Batch& operator*() const { return *batch_; }
  Batch* operator->() const { return batch_; }
  BatchIterator& operator++() {
    const detail::AnyBatch* next = cursor_->next();
    batch_ = next ? &detail::batch_as<Batch>(*next) : nullptr;
    return *this;
  }
  void operator++(int) { ++*this; }
  friend bool operator==(const BatchIterator& iterator, std::default_sentinel_t) { return iterator.batch_ == nullptr; }

 private:
  std::shared_ptr<detail::BatchCursor> cursor_;
  Batch* batch_ = nullptr;
};

}  // namespace accelerate::data
