#include <utility>

#include "accelerate/utils/archive.hpp"
#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "data/counts.hpp"
#include "feeds.hpp"

namespace accelerate::data::detail {

namespace {

/// The bytes of all ranks that read other samples.
std::vector<std::string> from_all_readers(const std::string& bytes) {
  const auto group = comm::mesh().along(comm::kSamples);
  return group ? comm::all_gather_bytes(*group, bytes) : std::vector<std::string>{bytes};
}

}  // namespace

AgreedFeed::AgreedFeed(const BatchOps& ops, std::unique_ptr<Pass> pass, const PreparedSettings& settings,
                       int64_t batch_size, bool drop_last)
    : ops_(ops),
      pass_(std::move(pass)),
      ranks_(settings.num_processes),
      rank_(settings.process_index),
      batch_size_(batch_size),
      drop_last_(drop_last) {}

std::optional<LoadedBatch> AgreedFeed::next() {
  if (ended_) return std::nullopt;
  AnyBatch mine;
  std::exception_ptr error;
  try {
    if (auto loaded = pass_->next()) mine = std::move(loaded->batch);
  } catch (...) {
    error = std::current_exception();
  }
  const std::pair<int64_t, std::string> report{mine ? ops_.rows(mine) : 0, error ? what_of(error) : ""};
  int64_t samples = 0, full = 0;
  std::optional<std::pair<int64_t, std::string>> failure;
  int64_t rank = 0;
  for (const std::string& bytes : from_all_readers(to_bytes(report))) {
    const auto [rows, what] = from_bytes<std::pair<int64_t, std::string>>(bytes);
    samples += rows;
    full += rows == batch_size_;
    if (!what.empty() && !failure) failure = {rank, what};
    ++rank;
  }
  if (failure || samples == 0 || (drop_last_ && full < ranks_)) ended_ = true;
  if (error) std::rethrow_exception(error);
  if (failure) throw_reader_failed(failure->first, failure->second);
  if (ended_) return std::nullopt;
  if (full == ranks_) return LoadedBatch{std::move(mine), drop_last_ ? -1 : 0};
  return shared_out(mine, samples);
}

LoadedBatch AgreedFeed::shared_out(const AnyBatch& mine, int64_t samples) const {
  ArchiveWriter writer;
  writer.write(mine != nullptr);
  if (mine) ops_.write(mine, writer);
  std::vector<AnyBatch> all;
  for (const std::string& bytes : from_all_readers(writer.take())) {
    ArchiveReader reader(bytes);
    bool present = false;
    reader.read(present);
    if (present) all.push_back(ops_.read(reader));
  }
  const int64_t each = (samples + ranks_ - 1) / ranks_;
  const AnyBatch joined = ops_.concat(all);
  const AnyBatch whole = ops_.complete(joined, joined, each * ranks_);
  counts::add(DataCount::samples_repeated, each * ranks_ - samples);
  return {ops_.slice(whole, each * rank_, each * (rank_ + 1), each * ranks_), samples};
}

}  // namespace accelerate::data::detail
