#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "precision/fp8/delayed.hpp"
#include "precision/fp8/operand.hpp"
#include "precision/fp8/plan.hpp"

namespace accelerate::fp8 {

/// A parameter of two dimensions.
struct Fp8Weight {
  std::string name;
  at::Tensor tensor;
  int64_t slot = -1;  ///< in the histories; -1: it takes no part

  /// Codes that are kept for further micro-batches, made of the weight as [outputs, inputs].
  struct Kept {
    Operand for_y, for_x;
    bool turned;  ///< the parameter is [inputs, outputs]
    uint32_t version;
  };
  std::optional<Kept> kept;
};

/// The weight that a product meets.
struct FoundWeight {
  Fp8Weight* weight;
  bool turned;  ///< the operand is the parameter's transpose
};

/// Tensors of a weight in the histories.
enum Forward : int64_t { kInput, kWeight, kOutput, kForwardWidth };
enum Backward : int64_t { kGradOutput, kGradInput, kBackwardWidth };

/// All that fp8 training of one model shares between forward, backward and recomputation.
struct Core {
  explicit Core(FP8Recipe settings) : recipe(std::move(settings)), plan(plan_of(recipe)) {}

  const FP8Recipe recipe;
  const ProductPlan plan;
  std::vector<Fp8Weight> weights;
  std::vector<std::string> taking_part;
  std::optional<Histories> forward, backward;  ///< of delayed scaling
  AmaxReduction reduction;
  FP8Training::Counts counts;

  /// The parameter that a tensor is, whole, or its transpose.
  std::optional<FoundWeight> find(const at::Tensor& operand);
  /// Parameters may have got other storages.
  void index();
  void settle();

 private:
  std::multimap<const void*, size_t> by_storage_;
};

}  // namespace accelerate::fp8
