#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "accelerate/data/sampler.hpp"

namespace accelerate::data::detail {

/// The order that a pass of all ranks' batches has shown so far.
struct OrderSeen {
  int64_t count = 0;                                      ///< of the first samples, those that are in the hash
  uint64_t hash = 0;                                      ///< of the first samples and where their batches end
  Indices first = {};                                     ///< the very first ones, for messages
  int64_t batches = 0, samples = 0, samples_of_step = 0;  ///< given; the last of an incomplete step of all ranks
  bool ended = false;
};

/// Looks at the batches of all ranks on their way to those of one.
class WatchedBatchSampler final : public BatchSamplerWrapper {
 public:
  /// @param batches_per_step  of all ranks together
  /// @param look_ahead        samples that start() reads at once, for their hash
  WatchedBatchSampler(std::shared_ptr<AnyBatchSampler> inner, int64_t batches_per_step, int64_t look_ahead)
      : BatchSamplerWrapper(std::move(inner)), batches_per_step_(batches_per_step), look_ahead_(look_ahead) {}
  Cursor<Indices> start() override;
  std::optional<int64_t> size() const override { return inner_->size(); }
  /// The order of the latest pass.
  const OrderSeen& seen() const { return *seen_; }

 private:
  int64_t batches_per_step_, look_ahead_;
  std::shared_ptr<OrderSeen> seen_ = std::make_shared<OrderSeen>();
};

}  // namespace accelerate::data::detail
