#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "parallel/sharding/shard_groups.hpp"
#include "parallel/sharding/sharded_part.hpp"

namespace accelerate::residency {
class Residency;
}

namespace accelerate::parallel {

/// The `grad()` of a sharded model's parameters: after a backward that averaged, a tensor of the parameter's sizes that
/// is whole to every operator, as the parameter is. Reading it gathers the part's shards, which all ranks do
/// together; what is written to it reaches this rank's shard at once; clearing or replacing it clears or replaces the
/// shard's gradient, on which optimizers step.
class WholeGradients {
 public:
  /// @param meet  before shards are gathered, by all ranks
  WholeGradients(std::vector<ShardedPart>& parts, const ShardGroups& groups, std::function<void()> meet);
  ~WholeGradients();

  /// Every shard's gradient shows as its parameter's. Not collective.
  void show();
  /// Takes what the program has made of grad() since then to the shard: it was cleared, or replaced by another tensor.
  /// @param left  what stands there without having been shown waits to be averaged: it stays
  /// @return whether it was replaced, and does not show now
  bool settle(ShardedMember& member, bool left);
  /// Whether grad() is still the tensor that was shown.
  bool shows(const ShardedMember& member) const;
  /// Right before backward adds to grad(): the tensor that is shown goes, and the shard keeps its values.
  void make_way(ShardedMember& member);
  /// grad() and the shards' gradients were set from outside: what stands in grad() has not been averaged.
  void start_anew();
  /// Backward has added to grad() without averaging.
  void note_local(const ShardedMember& member);
  /// Takes the gradient in grad() to be averaged; it leaves grad().
  at::Tensor take(ShardedMember& member);
  /// Gives back the gradients that were gathered for readers.
  void release();
  /// Nothing is shown any more of a member whose shard's gradient somebody has cleared, nor what waits to be averaged.
  /// @param by_whole  what was cleared is the module's grad(), not the shard's
  void clear(ShardedMember& member, bool by_whole);

 private:
  enum class Shows { nothing, whole, local };
  struct State {
    Shows shows = Shows::nothing;
    at::Tensor whole;  ///< what is shown while shows == whole; used again
  };
  State& state(const ShardedMember& member) { return states_[member.part][member.index]; }
  const State& state(const ShardedMember& member) const { return states_[member.part][member.index]; }
  void show_nothing(State& state);
  /// An optimizer that was not prepared clears shards, and knows nothing of what shows them.
  void drop_cleared(ShardedMember& member);
  /// The tensors to show of a part, made when they are first needed.
  void make(ShardedPart& part);
  /// Somebody else holds what has been shown, and would see another gradient in it.
  bool is_held(const ShardedPart& part) const;

  std::vector<ShardedPart>& parts_;
  ShardGroups groups_;
  std::function<void()> meet_;
  int64_t shown_ = 0;                                               ///< how often
  std::vector<std::vector<State>> states_;                          ///< by part and member
  std::vector<std::unique_ptr<residency::Residency>> residencies_;  ///< by part
};

}  // namespace accelerate::parallel
