#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "parallel/sharding/sharded_part.hpp"
#include "residency/home.hpp"
#include "residency/homes/coded.hpp"
#include "residency/residency.hpp"

namespace accelerate::parallel {

/// Frozen parts of which a rank keeps 8-bit codes alone (ShardedPart::coded). Their masters, and with them members'
/// shards, come where an operator reads or writes them.
class FrozenCodes {
 public:
  FrozenCodes();

  /// Gives part.codes memory, and part.master its sizes. @param numel  of this rank's slice
  void allocate(ShardedPart& part, int64_t numel, const at::Device& device);
  /// The home of the part's slice.
  std::unique_ptr<residency::Home> home(const ShardedPart& part) const;
  /// Masters that have come go again.
  void release() { masters_.release(); }

 private:
  std::map<size_t, std::shared_ptr<residency::CodedValues>> values_;  ///< by part
  residency::Residency masters_;
};

}  // namespace accelerate::parallel
