#include <algorithm>
#include <utility>

#include "accelerate/comm.hpp"
#include "accelerate/utils/archive.hpp"
#include "data/counts.hpp"
#include "feeds.hpp"
#include "utils/error_text.hpp"
#include "utils/raise.hpp"

namespace accelerate::data::detail {

struct DispatchFeed::Header {
  std::string failure = {};          ///< not empty: rank 0 could not read
  bool end = false;                  ///< nothing more comes, and nothing with this
  bool last = false;                 ///< this batch is the last
  int64_t rows = 0;                  ///< rows of the batch that comes along
  int64_t samples = 0;               ///< of which are no repetitions
  std::vector<int64_t> bounds = {};  ///< rank r's rows are [bounds[r], bounds[r + 1])
  ACCELERATE_FIELDS(failure, end, last, rows, samples, bounds)
};

DispatchFeed::DispatchFeed(const BatchOps& ops, std::unique_ptr<Pass> pass, const PreparedSettings& settings, Plan plan)
    : ops_(ops),
      pass_(std::move(pass)),
      ranks_(settings.num_processes),
      rank_(settings.process_index),
      split_(settings.config.split_batches),
      plan_(std::move(plan)) {}

std::optional<LoadedBatch> DispatchFeed::next() {
  if (ended_) return std::nullopt;
  AnyBatch batch;
  Header header;
  if (pass_) {
    std::exception_ptr error;
    try {
      header = next_batch(batch);
    } catch (...) {
      error = std::current_exception();
      header = {.failure = what_of(error)};
    }
    ArchiveWriter writer;
    writer.write(header);
    if (header.failure.empty() && !header.end) ops_.write(batch, writer);
    std::string bytes = writer.take();
    counts::add(DataCount::dispatched_bytes, static_cast<int64_t>(bytes.size()));
    comm::broadcast_bytes(bytes, 0);
    if (error) {
      ended_ = true;
      std::rethrow_exception(error);
    }
  } else {
    const std::string bytes = comm::broadcast_bytes("", 0);
    ArchiveReader reader(bytes);
    reader.read(header);
    if (header.failure.empty() && !header.end) batch = ops_.read(reader);
  }
  ended_ = header.end || header.last || !header.failure.empty();
  if (!header.failure.empty()) throw_reader_failed(0, header.failure);
  if (header.end) return std::nullopt;
  const int64_t begin = header.bounds[static_cast<size_t>(rank_)], end = header.bounds[static_cast<size_t>(rank_) + 1];
  return LoadedBatch{
      plan_.slice ? plan_.slice(batch, begin, end, rank_, ranks_) : ops_.slice(batch, begin, end, header.rows),
      header.samples};
}

DispatchFeed::Header DispatchFeed::next_batch(AnyBatch& batch) {
  if (!begun_) ahead_ = read_group();
  begun_ = true;
  if (failed_) std::rethrow_exception(failed_);
  if (!ahead_) return {.end = true};
  Group group = std::move(*ahead_);
  try {
    ahead_ = read_group();  // to know whether this one is the last
  } catch (...) {
    failed_ = std::current_exception();  // belongs to the next batch
  }
  return share(std::move(group), !ahead_ && !failed_, batch);
}

std::optional<DispatchFeed::Group> DispatchFeed::read_group() {
  ahead_.reset();
  std::vector<AnyBatch> batches;
  std::vector<int64_t> each_rows;
  const int64_t wanted = split_ ? 1 : ranks_;
  while (static_cast<int64_t>(batches.size()) < wanted) {
    auto loaded = pass_->next();
    if (!loaded) break;
    each_rows.push_back(ops_.rows(loaded->batch));
    batches.push_back(std::move(loaded->batch));
  }
  if (batches.empty() || (plan_.drop_last && static_cast<int64_t>(batches.size()) < wanted)) return std::nullopt;
  return Group{batches.size() == 1 ? std::move(batches[0]) : ops_.concat(batches), std::move(each_rows)};
}

DispatchFeed::Header DispatchFeed::share(Group group, bool last, AnyBatch& batch) {
  const int64_t samples = ops_.rows(group.batch);
  if (!first_ && !plan_.first_rows) first_ = ops_.slice(group.batch, 0, std::min(ranks_, samples), samples);
  Header header{.last = last, .rows = samples, .samples = samples, .bounds = {0}};
  if (plan_.sizes_vary && static_cast<int64_t>(group.each_rows.size()) == ranks_) {
    for (const int64_t rows : group.each_rows)
      header.bounds.push_back(header.bounds.back() + rows);  // a batch each, as the sampler made them
  } else {
    // Every rank must get something: an empty batch would leave it out of the next collective.
    if (samples < ranks_ || (last && samples % ranks_ != 0 && !plan_.drop_last)) {
      header.rows = (samples + ranks_ - 1) / ranks_ * ranks_;
      if (plan_.first_rows) first_ = plan_.first_rows();
      group.batch = ops_.complete(group.batch, first_, header.rows);
      counts::add(DataCount::samples_repeated, header.rows - samples);
    }
    for (int64_t rank = 0; rank < ranks_; ++rank)
      header.bounds.push_back(header.bounds.back() + header.rows / ranks_ + (rank < header.rows % ranks_));
  }
  batch = std::move(group.batch);
  return header;
}

void throw_reader_failed(int64_t rank, const std::string& what) {
  raise<CommError>("DataLoader: rank {} failed to read a batch that this rank shares, expected one; its error was: {}",
                   rank, what);
}

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return text_of(e);
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace accelerate::data::detail
