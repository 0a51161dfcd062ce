#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "observe/step_file.hpp"

namespace accelerate::launcher {

/// How fast one rank steps and what it has logged, from the files in which it says so (observe/step_file.hpp).
class StepCounter {
 public:
  /// Makes the files, with zeros. @throws LaunchError when it can't be written.
  explicit StepCounter(std::filesystem::path file);
  void look();
  /// Nothing before the first step.
  std::optional<int64_t> steps() const;
  /// Over the last ten seconds or two steps, whichever takes longer; falls when the next step is overdue.
  /// @param now_ns  CLOCK_MONOTONIC
  std::optional<double> per_second(uint64_t now_ns) const;

  /// Adds a record that look() has read.
  void add(const StepRecord& record);

  /// Figures that the program gives beside its steps; nothing for those that it doesn't give. Rates are of the same
  /// steps as per_second(), and fall as that does; shares are of these steps' time, 0 to 1.
  std::optional<int64_t> tokens() const;
  std::optional<double> tokens_per_second(uint64_t now_ns) const;
  std::optional<double> flops_per_second(uint64_t now_ns) const;
  std::optional<double> comm_share() const;
  std::optional<double> data_share() const;

  /// Its latest numbers by their names, plain text, in the order in which these came.
  const std::vector<std::pair<std::string, double>>& logged() const { return logged_; }

 private:
  void look_at_logged();
  std::optional<double> over_window(double first, double last, uint64_t now_ns) const;
  std::optional<double> share(uint64_t first_ns, uint64_t last_ns) const;

  std::filesystem::path file_;
  std::deque<StepRecord> seen_;  ///< different ones, the oldest first
  std::vector<std::pair<std::string, double>> logged_;
};

}  // namespace accelerate::launcher
