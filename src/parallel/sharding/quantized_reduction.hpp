#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/sharding/shard_groups.hpp"
#include "parallel/sharding/sharded_part.hpp"
#include "residency/homes/wire.hpp"

namespace accelerate::parallel {

/// Averages over the ranks of a shard group of gradients that travel as 4-bit codes (ShardedPart::int4), each rank
/// getting its slice. Codes can't be added up on their way, so ranks send each other pieces. Where there are several
/// machines, those of one first average what they have for each machine, and only that goes there, as codes anew.
/// Averages are worked out in fp32. Source: ZeRO++, arXiv:2306.10209 (qgZ).
class QuantizedReduction {
 public:
  QuantizedReduction(const std::vector<ShardedPart>& parts, const ShardGroups& groups);

  // All ranks call these for the same parts in the same order. None waits for what another rank does in a later call.

  /// @param flat  [part.numel()], which has been read when it returns
  void start(size_t part, const at::Tensor& flat);
  /// In the order of start(). Blocks until the ranks of the machine have sent theirs.
  void pass_on(size_t part);
  /// After the pass_on() of all parts. Blocks. @return [part.numel() / ranks], in the dtype of what start() was given
  at::Tensor take_result(size_t part);

 private:
  struct Running {
    at::ScalarType dtype = at::kFloat;
    at::Tensor sent, came;  ///< messages, by rank
    c10::intrusive_ptr<c10::ivalue::Future> arrived;
    at::Tensor mean;  ///< fp32, of what has come
  };

  void exchange(Running& running, comm::Group& group, at::Tensor message);
  void receive(Running& running, comm::Group& group, int64_t numel);

  const std::vector<ShardedPart>& parts_;
  ShardGroups groups_;
  std::unique_ptr<residency::Wire> wire_;
  std::vector<Running> running_;  ///< by part
};

}  // namespace accelerate::parallel
