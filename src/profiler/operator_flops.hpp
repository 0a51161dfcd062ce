#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <optional>

namespace accelerate::profiler {

/// Operations of one call. A multiply-accumulate is two floating-point operations.
struct OperatorCost {
  int64_t flops = 0;
  int64_t macs = 0;  ///< multiply-accumulates
};

/// The operations of a call as far as they are known when it begins: those that its inputs decide, and those for each
/// element of its result. For a RecordFunction's callback, which sees inputs at the beginning and results at the end
/// only.
class BegunCost {
 public:
  /// Nothing for operators that are made of others, which count by themselves, or only move bytes. Products,
  /// convolutions, attention, norms, recurrent layers, pooling, and one operation for each element of element-wise
  /// arithmetic. Source: DeepSpeed's profiling/flops_profiler, whose numbers these are where it counts an operator at
  /// all; but a product with a vector, or over dimensions that are broadcast, counts as it is.
  static std::optional<BegunCost> of(const at::RecordFunction& function);

  OperatorCost end(const at::RecordFunction& function) const;

  OperatorCost fixed = {}, per_result = {};
};

}  // namespace accelerate::profiler
