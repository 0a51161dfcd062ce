#include "watched_sampler.hpp"

#include <deque>
#include <exception>

namespace accelerate::data::detail {
namespace {

constexpr size_t kShown = 4;  ///< samples that messages name

void add(OrderSeen& seen, const Indices& batch) {
  const auto hash = [&](int64_t value) {  // FNV-1a by words
    seen.hash = (seen.hash ^ static_cast<uint64_t>(value)) * 0x100000001b3U;
    seen.hash ^= seen.hash >> 29U;
  };
  for (const int64_t index : batch) {
    hash(index);
    if (seen.first.size() < kShown) seen.first.push_back(index);
  }
  hash(-1);
  seen.count += static_cast<int64_t>(batch.size());
}

}  // namespace

Cursor<Indices> WatchedBatchSampler::start() {
  const auto seen = std::make_shared<OrderSeen>(OrderSeen{.hash = 0xcbf29ce484222325U});
  seen_ = seen;
  auto next = inner_->start();
  std::deque<std::optional<Indices>> ahead;
  std::exception_ptr failed;  // belongs to the batch after those
  try {
    while (seen->count < look_ahead_ && (ahead.empty() || ahead.back())) {
      ahead.push_back(next());
      if (ahead.back()) add(*seen, *ahead.back());
    }
  } catch (...) {
    failed = std::current_exception();
  }
  return [seen, next = std::move(next), ahead = std::move(ahead), failed = std::move(failed),
          per_step = batches_per_step_]() mutable -> std::optional<Indices> {
    std::optional<Indices> batch;
    if (!ahead.empty()) {
      batch = std::move(ahead.front());
      ahead.pop_front();
    } else if (failed) {
      std::rethrow_exception(failed);
    } else if (!seen->ended) {
      batch = next();
    }
    if (!batch) {
      seen->ended = true;
      return std::nullopt;
    }
    const auto size = static_cast<int64_t>(batch->size());
    if (seen->batches++ % per_step == 0) seen->samples_of_step = 0;
    seen->samples += size;
    seen->samples_of_step += size;
    return batch;
  };
}

}  // namespace accelerate::data::detail
