#pragma once

#include <cstdint>

namespace accelerate {

/// How a rank tells the launcher's monitor where it is: a file of these bytes that both have mapped. docs/monitor.md
/// describes it for programs in other languages. All count from the process's start to the last step; zero is what
/// nobody has said.
struct StepRecord {
  uint64_t steps = 0;  ///< written last
  uint64_t at_ns = 0;  ///< CLOCK_MONOTONIC when the last of them was done
  uint64_t tokens = 0;
  double flops = 0;           ///< floating-point operations of the model
  uint64_t comm_wait_ns = 0;  ///< that the training thread waited for other ranks
  uint64_t data_wait_ns = 0;  ///< and for batches

  bool operator==(const StepRecord&) const = default;
};
static_assert(sizeof(StepRecord) == 48);

/// The variable in which a rank finds the file's path; unset when nobody monitors.
inline constexpr const char* kStepFileVariable = "ACCELERATE_MONITOR_FILE";

}  // namespace accelerate
