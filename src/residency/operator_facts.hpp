#pragma once

#include <ATen/core/function_schema.h>

#include <cstdint>
#include <optional>

namespace accelerate::residency {

/// The facts about an operator that handlers need before it runs.
struct OperatorFacts {
  /// false: it makes a view, or a tensor of the same kind, and never looks at its arguments' data
  bool needs_bytes = true;
  bool makes_tensors = false;    ///< among its results are tensors
  uint64_t writes = 0;           ///< bit i: argument i is written to
  std::optional<size_t> device;  ///< which argument names the device

  bool writes_to(size_t argument) const { return argument < 64 && (writes >> argument & 1); }
};

/// Worked out once per thread and operator.
const OperatorFacts& facts_of(const c10::FunctionSchema& schema);

}  // namespace accelerate::residency
