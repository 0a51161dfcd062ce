#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "residency/unit.hpp"

namespace accelerate::parallel {

/// How one part of a unit (one flat storage) is split: rank r of `world` owns the r-th of `world` equal stretches of
/// it.
struct ShardedPart {
  int32_t index = 0;  ///< among all parts of the model
  const residency::Unit* unit = nullptr;
  NamedTensors members;
  residency::Layout layout;
  bool trained = false;
  at::ScalarType master_dtype = at::kFloat;   ///< of the shards, of what the optimizer sees
  at::ScalarType compute_dtype = at::kFloat;  ///< of the flat storage
  at::Tensor master;                          ///< [numel / world]: this rank's stretch
  std::vector<at::Tensor> shards;             ///< per member: its piece of `master`, a view, 1-D
  std::vector<int64_t> begins;                ///< per member: where that piece begins in the flattened member

  int64_t numel() const { return layout.numel; }

  /// Cuts `master` into the members' pieces.
  void cut(int64_t rank, int64_t world);
};

}  // namespace accelerate::parallel
