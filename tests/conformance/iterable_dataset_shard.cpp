// IterableDatasetShard over the numbers below n.
#include "accelerate/data/dataset.hpp"
#include "runner.hpp"

namespace conformance::iterable_dataset_shard_cases {
namespace {

using namespace accelerate::data;

struct Range {
  int64_t n = 0, at = 0;
  std::optional<int64_t> next() {
    if (at == n) return std::nullopt;
    return at++;
  }
  void reset() { at = 0; }
  int64_t size() const { return n; }
};

void run(const json& file, Report& report) {
  for (const json& row : file.at("cases")) {
    json samples = json::array(), lengths = json::array(), counts = json::array();
    for (int64_t rank = 0; rank < row[3]; ++rank) {
      IterableDatasetShard shard(Range{row[0]}, {.batch_size = row[1],
                                                 .drop_last = row[2],
                                                 .num_processes = row[3],
                                                 .process_index = rank,
                                                 .split_batches = row[4]});
      std::vector<int64_t> mine;
      shard.reset();
      while (auto sample = shard.next()) mine.push_back(*sample);
      samples.push_back(mine);
      lengths.push_back(*shard.size());
      counts.push_back(row[5][static_cast<size_t>(rank)].size());
    }
    if (samples == row[5] && lengths == counts && row[6] != counts) {
      report.differs(
          row, "with split_batches the length is what the rank gets; the reference counts num_processes times as many");
      continue;
    }
    report.check(row, samples == row[5] && lengths == row[6],
                 [&] { return row.dump() + "\n    found " + samples.dump() + " " + lengths.dump(); });
  }
}

const Registration registration("iterable_dataset_shard", {run});

}  // namespace
}  // namespace conformance::iterable_dataset_shard_cases
