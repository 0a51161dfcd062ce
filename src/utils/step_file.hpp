#pragma once

#include <cstdint>

namespace accelerate {

/// How a rank tells the launcher's monitor where it is: a file of these 16 bytes that both have mapped. docs/monitor.md
/// describes it for programs in other languages.
struct StepRecord {
  uint64_t steps;  ///< done since the process started
  uint64_t at_ns;  ///< CLOCK_MONOTONIC when the last of them was done; written before `steps`
};
static_assert(sizeof(StepRecord) == 16);

/// The variable in which a rank finds the file's path; unset when nobody monitors.
inline constexpr const char* kStepFileVariable = "ACCELERATE_MONITOR_FILE";

}  // namespace accelerate
