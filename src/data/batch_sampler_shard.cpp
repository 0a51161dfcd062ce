#include <deque>
#include <utility>

#include "accelerate/data/sampler.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::data {
namespace {

int64_t length(const Indices& indices) { return static_cast<int64_t>(indices.size()); }

/// A batch that is shorter than the sampler's batch_size() counts as its last: rounds are filled up from there, and
/// batches behind a second such one are lost, here as in the reference. Once per pass.
void warn_of_short_batch(bool& warned, int64_t found, int64_t batch_size) {
  if (std::exchange(warned, true)) return;
  logs::warn("accelerate.data",
             "BatchSamplerShard: the sampler has a batch size of {} and gave another batch after one of {}: samples of "
             "their round are left out. A sampler of batches that vary in size must not have a batch_size()",
             batch_size, found);
}

/// Rank r gets elements [r * piece, (r + 1) * piece) of every full batch.
class SplitCursor {
 public:
  SplitCursor(const AnyBatchSampler& inner, Cursor<Indices> next, const ShardOptions& options)
      : next_(std::move(next)), options_(options), batch_size_(*inner.batch_size()), drop_last_(inner.drop_last()) {}

  std::optional<Indices> operator()() {
    if (done_) return std::nullopt;
    while (auto batch = next_()) {
      if (!last_.empty() && length(last_) < batch_size_) warn_of_short_batch(warned_, length(last_), batch_size_);
      last_ = std::move(*batch);
      if (first_.empty()) first_ = last_;
      if (length(last_) == batch_size_) return piece(last_);
    }
    done_ = true;
    if (drop_last_ || first_.empty() || length(last_) == batch_size_) return std::nullopt;
    if (options_.even_batches)
      for (size_t i = 0; length(last_) < batch_size_; ++i) last_.push_back(first_[i % first_.size()]);
    Indices mine = piece(last_);
    if (mine.empty()) return std::nullopt;
    return mine;
  }

 private:
  Indices piece(const Indices& batch) const {
    const int64_t size = batch_size_ / options_.num_processes;
    const int64_t begin = std::min(size * options_.process_index, length(batch));
    const int64_t end = std::min(begin + size, length(batch));
    return {batch.begin() + begin, batch.begin() + end};
  }

  Cursor<Indices> next_;
  ShardOptions options_;
  int64_t batch_size_;
  bool drop_last_;
  bool done_ = false, warned_ = false;
  Indices first_, last_;
};

/// Rank r gets every num_processes-th batch, once the whole round is known to be full.
class TurnsCursor {
 public:
  TurnsCursor(const AnyBatchSampler& inner, Cursor<Indices> next, const ShardOptions& options)
      : next_(std::move(next)), options_(options), batch_size_(inner.batch_size()), drop_last_(inner.drop_last()) {}

  std::optional<Indices> operator()() {
    while (!done_) {
      auto batch = next_();
      if (!batch) {
        done_ = true;
        if (!drop_last_ && count_ > 0) finish();
        break;
      }
      if (count_ > 0 && batch_size_ && length(last_) < *batch_size_)
        warn_of_short_batch(warned_, length(last_), *batch_size_);
      last_ = std::move(*batch);
      const int64_t turn = count_++ % options_.num_processes;
      if (!drop_last_ && count_ <= options_.num_processes) remember(last_);
      if (turn == options_.process_index) mine_ = last_;
      if (turn == options_.num_processes - 1 && full(last_)) {
        auto given = std::move(mine_);
        mine_.reset();
        return given;
      }
    }
    if (tail_.empty()) return std::nullopt;
    Indices batch = std::move(tail_.front());
    tail_.pop_front();
    return batch;
  }

 private:
  bool full(const Indices& batch) const { return !batch_size_ || length(batch) == *batch_size_; }

  void remember(const Indices& batch) {
    if (batch_size_) first_.insert(first_.end(), batch.begin(), batch.end());
    else first_batches_.push_back(batch);
  }

  /// The last round, when it is not complete.
  void finish() {
    if (!options_.even_batches) {
      if (mine_ && !mine_->empty()) tail_.push_back(std::move(*mine_));
      return;
    }
    if (batch_size_ && first_.empty()) return;
    if (mine_ && !mine_->empty() && full(*mine_)) tail_.push_back(std::move(*mine_));
    int64_t turn = count_ - 1;
    Indices batch = last_;
    if (full(batch)) {
      batch.clear();
      ++turn;
    }
    size_t from = 0;  // where in the first samples (or batches) the repetitions go on
    for (; turn % options_.num_processes != 0 || !batch.empty(); ++turn) {
      if (!batch_size_) batch = first_batches_[from++ % first_batches_.size()];
      else
        while (length(batch) < *batch_size_) batch.push_back(first_[from++ % first_.size()]);
      if (turn % options_.num_processes == options_.process_index) tail_.push_back(std::move(batch));
      batch.clear();
    }
  }

  Cursor<Indices> next_;
  ShardOptions options_;
  std::optional<int64_t> batch_size_;
  bool drop_last_;
  bool done_ = false, warned_ = false;
  int64_t count_ = 0;  // batches seen
  Indices first_, last_;
  std::vector<Indices> first_batches_;
  std::optional<Indices> mine_;
  std::deque<Indices> tail_;
};

}  // namespace

BatchSamplerShard::BatchSamplerShard(std::shared_ptr<AnyBatchSampler> inner, const ShardOptions& options)
    : BatchSamplerWrapper(std::move(inner)), options_(options) {
  if (options_.num_processes < 1 || options_.process_index < 0 || options_.process_index >= options_.num_processes)
    raise<ConfigError>(
        "BatchSamplerShard: found process_index {} of {} processes, expected 0 <= process_index < num_processes",
        options_.process_index, options_.num_processes);
  if (!options_.split_batches) return;
  const auto size = inner_->batch_size();
  if (!size)
    raise<ConfigError>(
        "BatchSamplerShard: split_batches is set but the sampler has no batch size, expected a multiple of "
        "num_processes ({}); batches of varying sizes can't be split, set split_batches = false",
        options_.num_processes);
  if (*size % options_.num_processes != 0)
    raise<ConfigError>(
        "BatchSamplerShard: split_batches is set and the batch size is {}, expected a multiple of num_processes ({}), "
        "because every rank gets an equal piece; change batch_size or set split_batches = false",
        *size, options_.num_processes);
}

Cursor<Indices> BatchSamplerShard::start() {
  if (options_.split_batches) return SplitCursor(*inner_, inner_->start(), options_);
  return TurnsCursor(*inner_, inner_->start(), options_);
}

std::optional<int64_t> BatchSamplerShard::size() const {
  const auto all = inner_->size();
  if (!all) return std::nullopt;
  const int64_t ranks = options_.num_processes;
  if (options_.split_batches) {
    // A short last batch that is not completed may not reach this rank.
    const auto samples = inner_->num_samples();
    if (!options_.even_batches && !inner_->drop_last() && samples) {
      const int64_t rest = *samples % *inner_->batch_size();
      if (rest > 0 && rest <= *inner_->batch_size() / ranks * options_.process_index) return *all - 1;
    }
    return *all;
  }
  const int64_t whole = *all / ranks, rest = *all % ranks;
  if (rest == 0 || inner_->drop_last()) return whole;
  if (options_.even_batches) return whole + 1;
  return options_.process_index < rest ? whole + 1 : whole;
}

}  // namespace accelerate::data
