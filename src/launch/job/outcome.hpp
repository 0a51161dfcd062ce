#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace accelerate::launcher {

using Clock = std::chrono::steady_clock;

/// How a rank ended.
struct End {
  int exit_code = 0;
  int signal = 0;  ///< the signal that ended it, or 0
  Clock::time_point at{};
  bool asked = false;  ///< it had been told to stop before
  bool good() const { return exit_code == 0 && signal == 0; }
  int status() const { return signal ? 128 + signal : exit_code; }
};

/// "was killed by signal 9 (SIGKILL)", "ended with exit code 3".
std::string describe(const End& end);

/// How likely a failure is the cause of those of other ranks, 0 being the likeliest. Nobody else causes a kill or an
/// invalid access, whereas 69 is how a program of this library ends when a *peer* went away.
int blame_kind(const End& end);
inline constexpr int kOfAPeer = 2;  ///< the kind of 69

/// The record of a rank: that it runs, and afterwards how it ended.
struct RankRecord {
  int64_t rank = 0;
  int64_t local_rank = 0;
  pid_t pid = -1;
  Clock::time_point started{};
  std::optional<End> end;
  int64_t place = 0;  ///< how many ranks ended before it
  /// When it last wrote to stderr, as far as that passes through the launcher.
  std::optional<Clock::time_point> last_word;
  std::string stderr_tail;  ///< what it wrote there last, as far as that passes through the launcher or a log file
};

/// The index of the rank whose failure caused those of the others, among the ranks that failed before anybody asked
/// them to stop. All have ended.
std::optional<size_t> first_failure(const std::vector<RankRecord>& ranks);

/// The outcome of this machine's part of the job.
struct Outcome {
  std::vector<RankRecord> ranks;
  std::optional<size_t> first_failure;  ///< index into ranks
  /// SIGINT, SIGTERM or SIGHUP that the launcher received while ranks were running, or SIGUSR1 that made them save.
  int stop_signal = 0;
  bool killed = false;   ///< some rank had to be killed by SIGKILL
  std::string recalled;  ///< why the other machines had the ranks stopped, or ""
  bool saved() const;    ///< all ranks have ended, because of a signal, with a checkpoint
  int exit_code() const;
};

}  // namespace accelerate::launcher
