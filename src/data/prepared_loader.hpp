#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "feeds.hpp"
#include "loader_progress.hpp"
#include "watched_sampler.hpp"

namespace accelerate::data::detail {

/// Decides what this rank reads of a loader, and in which way its batches come.
class PreparedLoader final : public LoaderProgress, public std::enable_shared_from_this<PreparedLoader> {
 public:
  /// @param batches  null for streams
  /// @throws ConfigError for settings that the loader can't follow.
  PreparedLoader(std::shared_ptr<LoaderCore> core, const PreparedSettings& settings,
                 const std::shared_ptr<AnyBatchSampler>& batches, SliceFunction<AnyBatch> slice, int64_t skip);

  void set_epoch(int64_t epoch) override;
  std::optional<int64_t> size() const override;
  std::shared_ptr<PreparedStatus> skipping(int64_t num_batches) const override;
  std::shared_ptr<BatchCursor> start() override;

 private:
  class Cursor;

  /// The stream reads its own share only.
  bool self_sharding() const;
  /// @param batches  those of all ranks
  std::shared_ptr<AnyBatchSampler> sharded_sampler(const std::shared_ptr<AnyBatchSampler>& batches) const;
  StreamPlan stream_plan() const;
  /// For the next pass.
  std::shared_ptr<AnyBatchSampler> watched(const std::shared_ptr<AnyBatchSampler>& batches);
  /// Ranks share out one order, which they had better all have.
  bool agrees_on_starts() const;
  /// Collective.
  std::unique_ptr<Pass> start_together(PassPlan& plan);
  /// The seed of the pass that has begun, if its order depends on seed and epoch only: then so do the numbers that data
  /// sets draw.
  std::optional<int64_t> seed_of_epoch() const;
  /// Samples of the last, incomplete step of all ranks; 0: none is incomplete. Unset: not known.
  std::optional<int64_t> rest_of_pass() const;
  /// The feed of a pass that leaves out so many samples and then so many steps.
  std::unique_ptr<Feed> make_feed(int64_t samples, int64_t steps);
  std::unique_ptr<Feed> make_dispatch_feed(PassPlan& plan);
  /// The first rows of a pass of which `plan` leaves out the start. Streams are read for them, then rewound.
  std::function<AnyBatch()> first_rows_of(PassPlan& plan);

  std::shared_ptr<LoaderCore> core_;
  SliceFunction<AnyBatch> slice_;
  std::weak_ptr<Cursor> running_;
  std::shared_ptr<WatchedBatchSampler> watched_;  ///< of the latest pass; null where ranks don't share batches out
  const std::string name_;                        ///< for traces
};

}  // namespace accelerate::data::detail
