#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <optional>

#include "utils/step_file.hpp"

namespace accelerate::launcher {

/// How fast one rank steps, from the file in which it counts (utils/step_file.hpp).
class StepCounter {
 public:
  /// Makes the file, with zeros. @throws LaunchError when it can't be written.
  explicit StepCounter(std::filesystem::path file);
  void look();
  /// Nothing before the first step.
  std::optional<int64_t> steps() const;
  /// Over the last ten seconds or two steps, whichever takes longer; falls when the next step is overdue.
  /// @param now_ns  CLOCK_MONOTONIC
  std::optional<double> per_second(uint64_t now_ns) const;

  /// What look() does with what it reads.
  void add(const StepRecord& record);

 private:
  std::filesystem::path file_;
  std::deque<StepRecord> seen_;  ///< different ones, the oldest first
};

}  // namespace accelerate::launcher
