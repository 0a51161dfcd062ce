#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "accelerate/precision/fp8.hpp"

namespace accelerate::fp8 {

/// Replaces bits of amax by the maximum over ranks; empty where this process is alone.
using AmaxReduction = std::function<void(at::Tensor& bits)>;

/// Transformer Engine's delayed scaling: scales from what tensors had as their largest values before.
/// Columns are tensors; `width` of them belong to a weight.
class Histories {
 public:
  struct Rule {
    int64_t length, margin, interval;
    AmaxComputeAlgo algorithm;
    float largest;  ///< number of the format
  };
  Histories(const Rule& rule, int64_t weights, int64_t width);

  /// fp32 [weights * width]. An update makes another tensor, so that whoever keeps this one has the scales of then.
  const at::Tensor& scales() const { return scales_; }
  at::Tensor column(const at::Tensor& scales, int64_t weight, int64_t tensor) const {
    return scales.select(0, weight * width_ + tensor);
  }
  void record(int64_t weight, int64_t tensor, const at::Tensor& amax);
  bool has_recorded() const { return recorded_; }

  /// Rolls histories and works out scales. Collective with a reduction; without effect where no rank has recorded
  /// anything but zeros.
  void update(const AmaxReduction& reduction);
  /// The number of updates that had an effect.
  int64_t updates() const;

  void to(const at::Device& device);
  /// The state of one weight, on the CPU.
  at::Tensor scale_of(int64_t weight) const;
  at::Tensor history_of(int64_t weight) const;
  /// @param history  [any length, width]
  void set(int64_t weight, const at::Tensor& scale, const at::Tensor& history);
  void set_updates(int64_t updates);

 private:
  Rule rule_;
  int64_t width_;
  at::Tensor scales_;   ///< [columns]
  at::Tensor history_;  ///< [length, columns]; row 0 is since the last update, then the oldest to the newest
  at::Tensor updates_;  ///< int64, where the others are
  bool recorded_ = false;
};

}  // namespace accelerate::fp8
