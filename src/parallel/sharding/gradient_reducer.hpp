#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "parallel/sharding/counts.hpp"
#include "parallel/sharding/settings.hpp"
#include "parallel/sharding/shard_groups.hpp"
#include "parallel/sharding/sharded_part.hpp"

namespace accelerate::parallel {

class UsedUnits;

/// Averages gradients over ranks, each rank getting its slice. One backward at a time: take() as gradients come, each
/// once, then finish(). Parts that are not trained (ShardedPart::trained, the same on all ranks) are left out.
class GradientReducer {
 public:
  virtual ~GradientReducer() = default;
  /// The whole gradient of one member; when all of a part are there its reduction starts. @return whether the part is
  /// complete now.
  virtual bool take(ShardedPart& part, ShardedMember& member, const at::Tensor& gradient) = 0;
  /// Whether the member's gradient has been taken since the last finish().
  virtual bool came(const ShardedMember& member) const = 0;
  /// Parts that are not complete are reduced with zeros for what is missing; then the shards' gradients are set or
  /// added to. Members without a gradient on any rank are left alone. Collective.
  virtual void finish() = 0;
  /// Frees the memory that waits for gradients.
  virtual void trim() {}
  /// Leaves out the average over replicas, or does it again.
  void set_apart(bool apart) { apart_ = apart; }
  /// Called within take() or finish() before the shards of a part get a backward's gradients: they go elsewhere when
  /// they are given, so that the next ones come in memory of their own.
  void set_coming(std::function<void(const ShardedPart&)> coming) { coming_ = std::move(coming); }
  /// Called within take() or finish() when the shards of a part have all of a backward's gradients, part by part in the
  /// order in which they are complete: a later one may still come.
  void set_given(std::function<void(const ShardedPart&)> given) { given_ = std::move(given); }

 protected:
  void tell_given(const ShardedPart& part) const {
    if (given_) given_(part);
  }
  void tell_coming(const ShardedPart& part) const {
    if (coming_) coming_(part);
  }
  bool gradients_go() const { return coming_ != nullptr; }
  bool apart_ = false;

 private:
  std::function<void(const ShardedPart&)> coming_;
  std::function<void(const ShardedPart&)> given_;
};

struct ReducerOptions {
  bool keeps_low_precision() const { return kept != KeptGradients::in_master_dtype; }
  bool widens() const { return kept == KeptGradients::as_reduced_until_added; }

  KeptGradients kept = {};  ///< what becomes of the result's dtype
  double times = 1;         ///< averages are multiplied by this
  double before = 1;        ///< what of the division comes before the sum, see ShardingSettings::divides_before
  bool overlap = true;      ///< else wait for each reduction as it starts, where gradients are sent
};

/// A part's gradients on their way to other ranks.
inline void count_reduced(int64_t elements, int64_t bytes) {
  counts::add(ShardingCount::gradients_reduced);
  counts::add(ShardingCount::gradient_elements, elements);
  counts::add(ShardingCount::gradient_wire_bytes, bytes);
}
inline void count_reduced(const at::Tensor& flat) { count_reduced(flat.numel(), static_cast<int64_t>(flat.nbytes())); }

/// Alone: gradients are the shards' gradients.
std::unique_ptr<GradientReducer> local_reducer(std::vector<ShardedPart>& parts, const ReducerOptions& options);
/// By c10d, asynchronously, in one order on all ranks. Collective.
/// @param used  compared at each end; null: nothing is
std::unique_ptr<GradientReducer> collective_reducer(std::vector<ShardedPart>& parts, const ShardGroups& groups,
                                                    const ReducerOptions& options, UsedUnits* used);

}  // namespace accelerate::parallel
