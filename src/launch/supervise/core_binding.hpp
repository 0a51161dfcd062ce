#pragma once

#include <cstdint>
#include <vector>

#include "launch/system/affinity.hpp"

namespace accelerate::launcher {

struct Host;
struct Job;

/// Which cores each rank is bound to by --enable_cpu_affinity.
class CoreBinding {
 public:
  /// Reads the machine's topology only if ranks are to be bound.
  CoreBinding(const Job& job, const Host& host);
  /// Logical processors; empty: the rank is not bound.
  std::vector<int> of(int64_t local_rank) const;

 private:
  const int64_t local_world_size_;
  bool binds_ = false;
  Topology topology_;
  std::vector<int64_t> gpus_;  ///< that ranks use, in this order; empty: all
};

}  // namespace accelerate::launcher
