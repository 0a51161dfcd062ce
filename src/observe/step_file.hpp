#pragma once

#include <cstddef>
#include <cstdint>

namespace accelerate {

/// How a rank tells the launcher's monitor where it is: a file of these bytes that both have mapped. docs/monitor.md
/// describes it for programs in other languages. All count from the process's start to the last step; zero stands for
/// what nobody has said.
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

/// A number that the program has logged, by its name. A second file has kMostLogged of them: the path of the first with
/// kLoggedFile behind it.
struct LoggedRecord {
  uint64_t count = 0;  ///< how many numbers of this name; 0: a free place. Written last
  double value = 0;    ///< the last of them
  char name[48] = {};  ///< UTF-8, zeros behind it
};
static_assert(sizeof(LoggedRecord) == 64);
inline constexpr size_t kMostLogged = 16;
inline constexpr const char* kLoggedFile = ".logged";

/// The variable in which a rank finds the file's path; unset when nobody monitors.
inline constexpr const char* kStepFileVariable = "ACCELERATE_MONITOR_FILE";

}  // namespace accelerate
