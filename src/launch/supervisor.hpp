#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "launch/job.hpp"
#include "launch/log_files.hpp"

namespace accelerate::launcher {

class Agent;
class Monitor;
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

/// What is known of a rank afterwards.
struct RankRecord {
  int64_t rank = 0;
  int64_t local_rank = 0;
  pid_t pid = -1;
  Clock::time_point started{};
  std::optional<End> end;
  int64_t place = 0;  ///< how many ranks ended before it
  std::optional<Clock::time_point>
      last_word;            ///< when it last wrote to stderr, as far as that passes through the launcher
  std::string stderr_tail;  ///< what it wrote there last, as far as that passes through the launcher or a log file
};

/// What became of this machine's part of the job.
struct Outcome {
  std::vector<RankRecord> ranks;
  std::optional<size_t> first_failure;  ///< index into ranks
  int stop_signal = 0;   ///< SIGINT, SIGTERM or SIGHUP that the launcher received while ranks were running
  bool killed = false;   ///< some rank had to be killed by SIGKILL
  std::string recalled;  ///< why the other machines had the ranks stopped, or ""
  int exit_code() const;
};

/// Starts and watches the ranks; returns when everything has ended. `say` receives the report that is to follow their
/// output.
/// @param agent    hears of a failure at once, and may have the ranks stopped; null on one machine
/// @param monitor  shows the ranks while they run; null: nobody wants to see them
Outcome supervise(const Job& job, const Host& host, const LogFiles& logs,
                  std::string (*say)(const Job&, const LogFiles&, const Outcome&), Agent* agent = nullptr,
                  Monitor* monitor = nullptr);

/// How likely a failure is the cause of those of other ranks, 0 being the likeliest.
int blame_kind(const End& end);

}  // namespace accelerate::launcher
