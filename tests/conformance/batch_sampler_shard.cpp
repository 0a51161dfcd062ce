// BatchSamplerShard over samplers with one batch size, with varying sizes, and with a batch size that some batches do
// not have.
#include <memory>

#include "accelerate/data/sampler.hpp"
#include "runner.hpp"

namespace conformance::batch_sampler_shard_cases {
namespace {

using namespace accelerate::data;

/// Batches from a list.
class ListedBatches : public AnyBatchSampler {
 public:
  ListedBatches(std::vector<Indices> batches, std::optional<int64_t> batch_size, bool drop_last)
      : batches_(std::move(batches)), batch_size_(batch_size), drop_last_(drop_last) {}
  Cursor<Indices> start() override {
    return [batches = batches_, next = size_t{0}]() mutable -> std::optional<Indices> {
      if (next == batches.size()) return std::nullopt;
      return batches[next++];
    };
  }
  std::optional<int64_t> size() const override { return static_cast<int64_t>(batches_.size()); }
  std::optional<int64_t> batch_size() const override { return batch_size_; }
  bool drop_last() const override { return drop_last_; }

 private:
  std::vector<Indices> batches_;
  std::optional<int64_t> batch_size_;
  bool drop_last_;
};

json batches_of(AnyBatchSampler& sampler) {
  json batches = json::array();
  auto next = sampler.start();
  while (auto batch = next()) batches.push_back(*batch);
  return batches;
}

std::shared_ptr<AnyBatchSampler> range(int64_t n, int64_t batch_size, bool drop_last) {
  return std::make_shared<BatchSampler>(std::make_shared<SequentialSampler>(n), batch_size, drop_last);
}

void run_fixed(const json& file, Report& report) {
  for (const json& row : file.at("cases")) {
    json batches = json::array(), lengths = json::array();
    for (int64_t rank = 0; rank < row[3]; ++rank) {
      BatchSamplerShard shard(
          range(row[0], row[1], row[2]),
          {.num_processes = row[3], .process_index = rank, .split_batches = row[4], .even_batches = row[5]});
      batches.push_back(batches_of(shard));
      lengths.push_back(*shard.size());
    }
    json counts = json::array();
    for (const json& rank : row[6]) counts.push_back(rank.size());
    if (batches == row[6] && lengths == counts && row[7] != counts) {
      report.differs(
          row,
          "the length is the number of batches that the rank gets; the reference counts one that only lower ranks get");
      continue;
    }
    report.check(row, batches == row[6] && lengths == row[7],
                 [&] { return row.dump() + "\n    found " + batches.dump() + " " + lengths.dump(); });
  }
  for (const json& row : file.value("errors", json::array())) {
    const bool thrown = throws_error([&] {
      BatchSamplerShard(range(10, row.at("batch_size"), false),
                        {.num_processes = row.at("num_processes"), .split_batches = row.at("split_batches")});
    });
    report.check(thrown, [&] { return row.dump() + "\n    found no error"; });
  }
}

void run_listed(const json& file, Report& report, bool with_size) {
  // with a size: batches, batch_size, drop_last, num_processes, even_batches, expected; without: batches,
  // num_processes, even_batches, expected
  for (const json& row : file.at("cases")) {
    const size_t at = with_size ? 3 : 1;
    const auto listed = std::make_shared<ListedBatches>(
        row[0].get<std::vector<Indices>>(), with_size ? std::optional<int64_t>(row[1].get<int64_t>()) : std::nullopt,
        with_size && row[2].get<bool>());
    json batches = json::array();
    for (int64_t rank = 0; rank < row[at]; ++rank) {
      BatchSamplerShard shard(listed, {.num_processes = row[at], .process_index = rank, .even_batches = row[at + 1]});
      batches.push_back(batches_of(shard));
    }
    report.check(row, batches == row[at + 2], [&] { return row.dump() + "\n    found " + batches.dump(); });
  }
  if (!with_size) {  // the file's note: split_batches needs a batch size
    const auto listed = std::make_shared<ListedBatches>(std::vector<Indices>{{0, 1}}, std::nullopt, false);
    report.check(throws_error([&] { BatchSamplerShard(listed, {.num_processes = 2, .split_batches = true}); }),
                 [] { return "split_batches without a batch size: found no error"; });
  }
}

const Registration fixed("batch_sampler_shard", {run_fixed});
const Registration variable("batch_sampler_shard_variable",
                            {[](const json& file, Report& report) { run_listed(file, report, false); }});
const Registration bucketed("batch_sampler_shard_bucketed",
                            {[](const json& file, Report& report) { run_listed(file, report, true); }});

void run_skip(const json& file, Report& report) {
  for (const json& row : file.at("cases")) {
    SkipBatchSampler skipping(range(row[0], row[1], false), row[2]);
    const json batches = batches_of(skipping);
    const int64_t size = *skipping.size();
    if (row[4] < 0 && batches == row[3] && size == 0) {
      report.differs(row, "a loader of which more is skipped than there is has 0 batches, not a negative number");
      continue;
    }
    report.check(row, batches == row[3] && size == row[4],
                 [&] { return row.dump() + "\n    found " + batches.dump() + " " + std::to_string(size); });
  }
}
const Registration skip("skip_batches", {run_skip});

void run_seedable(const json& file, Report& report) {
  for (const json& row : file.at("cases")) {
    SeedableRandomSampler sampler(row[0], row[1].get<int64_t>());
    json orders = json::array();
    for (size_t epoch = 0; epoch < row[2].size(); ++epoch) {
      sampler.set_epoch(static_cast<int64_t>(epoch));
      Indices order;
      auto next = sampler.start();
      while (auto index = next()) order.push_back(*index);
      orders.push_back(order);
    }
    report.check(orders == row[2], [&] { return row.dump() + "\n    found " + orders.dump(); });
  }
}
const Registration seedable("seedable_random_sampler", {run_seedable});

}  // namespace
}  // namespace conformance::batch_sampler_shard_cases
