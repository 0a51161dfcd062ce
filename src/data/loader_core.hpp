#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "accelerate/data/loader.hpp"
#include "pass.hpp"

namespace accelerate::data::detail {

/// The plan of what one pass reads.
struct PassPlan {
  std::shared_ptr<AnyBatchSampler> batches = nullptr;  ///< map data sets
  StreamPlan stream = {};                              ///< streams
  int64_t skip = 0;                                    ///< steps to leave out at the start
  bool draw_seed = true;                               ///< false: `seed` has one already
  /// The seed of the random numbers that data sets draw; may be changed until the first batch is read.
  std::shared_ptr<int64_t> seed = std::make_shared<int64_t>(0);
  std::optional<at::Generator> generator = std::nullopt;
};

class LoaderCore {
 public:
  /// @param options  checked
  LoaderCore(std::shared_ptr<MapSource> source, DataLoaderOptions options, std::shared_ptr<AnyBatchSampler> batches);
  LoaderCore(std::shared_ptr<StreamSource> source, DataLoaderOptions options);

  const DataLoaderOptions& options() const { return options_; }
  const BatchOps& ops() const { return ops_; }
  /// Samples of the data set as it was when the loader was made, when known.
  std::optional<int64_t> dataset_size() const { return dataset_size_; }
  bool is_stream() const { return stream_ != nullptr; }
  /// A stream that can read one rank's share only.
  bool can_shard() const { return stream_ && stream_->can_shard(); }
  /// Null for streams.
  const std::shared_ptr<AnyBatchSampler>& batches() const { return batches_; }
  /// Null for streams.
  const std::shared_ptr<MapSource>& map() const { return map_; }

  void set_epoch(int64_t epoch);
  /// The plan of a lone process.
  PassPlan whole() const;
  /// Batches of a lone process's pass, when known.
  std::optional<int64_t> num_batches() const;
  std::unique_ptr<Pass> start(const PassPlan& plan);

 private:
  std::function<Pass::Read()> stream_reads(const PassPlan& plan);
  std::function<Pass::Read()> map_reads(const PassPlan& plan) const;
  std::shared_ptr<WorkerPool> pool();

  DataLoaderOptions options_;
  std::shared_ptr<MapSource> map_;
  std::shared_ptr<StreamSource> stream_;
  const BatchOps& ops_;
  std::optional<int64_t> dataset_size_;
  std::shared_ptr<AnyBatchSampler> batches_;
  std::shared_ptr<int64_t> stream_passes_ = std::make_shared<int64_t>(0);  // that have begun to read
  std::mutex mutex_;
  std::shared_ptr<WorkerPool> pool_;  // last: joined before the rest goes
};

}  // namespace accelerate::data::detail
