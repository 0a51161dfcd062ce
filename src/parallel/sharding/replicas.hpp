#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "comm/shared_all_reduce.hpp"
#include "parallel/sharding/sharded_part.hpp"

namespace accelerate::comm {
class Group;
}

namespace accelerate::parallel {

/// The second half of hybrid sharding's averages: ranks that hold the same shards of a model average their shards of
/// the gradients, which the ranks of each replica have averaged. Parts go out as backward completes them, in an order
/// that does not depend on when that is.
class Replicas {
 public:
  /// Collective over `group`. @param before  see ShardingSettings::divides_before
  Replicas(const std::vector<ShardedPart>& parts, std::shared_ptr<comm::Group> group, double before = 1);

  /// This rank's shard of a trained part's gradient, zeros where the replica has none. Averaged in place at some time
  /// until finish() returns.
  void add(size_t part, at::Tensor gradient);
  /// After all trained parts were added, once per backward. Blocks. `used`: per part and member, whether any replica
  /// has a gradient for it (in: whether this one has).
  void finish(std::vector<std::vector<char>>& used);

 private:
  void advance();

  const std::vector<ShardedPart>& parts_;
  std::shared_ptr<comm::Group> group_;
  double before_;
  std::unique_ptr<comm::SharedAllReduce> shared_;  ///< null: replicas on several hosts
  std::vector<size_t> order_;                      ///< parts that may be trained; backward reaches the last ones first
  size_t next_ = 0;                                ///< in order_
  std::vector<at::Tensor> gradients_;
  std::vector<at::Tensor> exchange_;  ///< per part: memory that stays with shared_, which gradients don't
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> running_;
  std::vector<at::Tensor> summed_;  ///< by these
};

}  // namespace accelerate::parallel
