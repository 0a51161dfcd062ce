#pragma once

#include <ATen/core/function_schema.h>

#include <cstdint>

namespace accelerate::residency {

/// What the fallback must know about an operator before it runs.
struct OperatorFacts {
  bool needs_bytes =
      true;  ///< false: it makes a view, or a tensor of the same kind, and never looks at its arguments' data
  bool makes_tensors = false;  ///< among its results are tensors
  uint64_t writes = 0;         ///< bit i: argument i is written to
};

/// Worked out once per thread and operator.
const OperatorFacts& facts_of(const c10::FunctionSchema& schema);

}  // namespace accelerate::residency
