#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace accelerate::launcher {

/// The use of the machine by a process and everything that it started, from /proc.
struct ProcessUse {
  std::optional<double> cpu_percent;  ///< of one core, since the look before; absent at the first
  int64_t resident_bytes = 0;
};

/// Follows the processes of some roots. Looking at a known process is one read; the search for new ones comes at
/// every fifth look only, since that reads a file of every process of the machine.
class ProcessTrees {
 public:
  using Clock = std::chrono::steady_clock;
  /// @param roots  leaders of process groups, or -1 for what has ended
  /// @return one for each root; nothing for those that are gone
  std::vector<std::optional<ProcessUse>> look(const std::vector<pid_t>& roots, Clock::time_point now = Clock::now());

 private:
  struct Process {
    uint64_t started = 0;  ///< tells processes apart that had the same number
    uint64_t ticks = 0;    ///< of CPU time, all threads
  };
  struct Tree {
    pid_t root = -1;
    std::map<pid_t, Process> processes;
  };
  void find_members(const std::vector<pid_t>& roots);

  std::vector<Tree> trees_;
  int64_t looks_ = 0;
  Clock::time_point before_{};
};

}  // namespace accelerate::launcher
