#include <algorithm>
#include <utility>

#include "accelerate/data/dataset.hpp"
#include "accelerate/data/sources.hpp"
#include "utils/raise.hpp"

namespace accelerate::data::detail {

void CollatedStreamSource::reset(const StreamPlan& plan, int64_t skip, const AtStep& at_step) {
  rewind(plan);
  first_.reset();
  rest_.reset();
  ended_ = false;
  for (int64_t left = plan.skip_samples; left > 0 && !ended_;) {
    const AnyBatch batch = at_most(std::min(plan.chunk, left), left);
    if (batch) left -= ops().rows(batch);
  }
  for (int64_t step = 0; step < skip; ++step) {
    at_step(step);
    if (!read(plan)) return;
  }
}

/// Asks for `wanted` rows. A stream may give another number of them: what is beyond `most` waits for the next call.
AnyBatch CollatedStreamSource::at_most(int64_t wanted, int64_t most) {
  AnyBatch batch = rest_ ? std::exchange(rest_, AnyBatch()) : request(wanted);
  ended_ = !batch;
  const int64_t rows = batch ? ops().rows(batch) : 0;
  if (rows <= most) return batch;
  rest_ = ops().slice(batch, most, rows, rows);
  return ops().slice(batch, 0, most, rows);
}

std::optional<LoadedBatch> CollatedStreamSource::read(const StreamPlan& plan) {
  std::vector<AnyBatch> batches;
  int64_t got = 0;
  while (!ended_ && got < plan.group) {
    AnyBatch batch = at_most(std::min(plan.chunk, plan.group - got), plan.group - got);
    if (!batch) break;
    got += ops().rows(batch);
    batches.push_back(std::move(batch));
  }
  if (got == 0 || (got < plan.group && plan.drop_last)) return std::nullopt;
  AnyBatch group = batches.size() == 1 ? std::move(batches[0]) : ops().concat(batches);
  if (plan.complete && !first_) first_ = ops().concat(std::vector<const AnyBatch*>{&group});
  if (plan.complete && got < plan.group) group = ops().complete(group, first_, plan.group);
  const int64_t rows = ops().rows(group);
  const bool all = plan.begin == 0 && plan.end >= rows;
  return LoadedBatch{all ? std::move(group) : ops().slice(group, plan.begin, std::min(plan.end, rows), rows),
                     plan.drop_last ? -1 : got % plan.group};
}

StreamPlan shard_plan(const IterableDatasetShardOptions& options) {
  const int64_t ranks = options.num_processes;
  if (options.batch_size < 1 || ranks < 1 || options.process_index < 0 || options.process_index >= ranks)
    raise<ConfigError>(
        "IterableDatasetShard: found batch_size {} and process_index {} of {} processes, expected batch_size >= 1 and "
        "0 <= process_index < num_processes",
        options.batch_size, options.process_index, ranks);
  if (options.split_batches && options.batch_size % ranks != 0)
    raise<ConfigError>(
        "IterableDatasetShard: split_batches is set and the batch size is {}, expected a multiple of num_processes "
        "({}), because every rank gets an equal piece; change batch_size or set split_batches = false",
        options.batch_size, ranks);
  const int64_t share = options.split_batches ? options.batch_size / ranks : options.batch_size;
  return {.group = share * ranks,
          .begin = share * options.process_index,
          .end = share * (options.process_index + 1),
          .chunk = options.batch_size,
          .complete = !options.drop_last,
          .drop_last = options.drop_last};
}

}  // namespace accelerate::data::detail
