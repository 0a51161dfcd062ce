#include "launch/machines.hpp"

#include <cstdio>

#include "launch/log_files.hpp"
#include "launch/report.hpp"
#include "launch/supervisor.hpp"

namespace accelerate::launcher {
namespace {

std::string what_failed(const Outcome& outcome, int64_t world_size) {
  const auto& rank = outcome.ranks[*outcome.first_failure];
  return "rank " + std::to_string(rank.rank) + " of " + std::to_string(world_size) + " " + describe(*rank.end);
}

}  // namespace

int launch_on_machines(Job job, const Host& host, Monitor* monitor) {
  const auto say = [&](const std::string& line) {
    if (!job.options.quiet) std::fprintf(stderr, "accelerate launch: %s\n", line.c_str());
  };
  Agent agent(job, monitor);
  const int64_t most = job.num_machines;
  for (;; ++job.attempt) {
    const auto round = agent.join();
    if (!round) break;
    job.round = round;
    job.machine_rank = round->group_rank;
    job.num_machines = round->group_world_size;
    job.world_size = round->world_size;
    if (job.attempt > 0 || job.num_machines < most)
      say("round " + std::to_string(round->number) + ": machine " + std::to_string(round->group_rank) + " of " +
          std::to_string(job.num_machines) + ", ranks from " + std::to_string(round->first_rank) + " of " +
          std::to_string(job.world_size) + " (restart " + std::to_string(round->restarts) + " of " +
          std::to_string(job.options.max_restarts) + ")");
    const LogFiles logs(job);
    if (job.attempt == 0 && !logs.folder().empty()) say("log files are in " + logs.folder().string());
    const Outcome outcome = supervise(job, host, logs, report, &agent, monitor);
    if (outcome.stop_signal) {
      agent.leave("its launcher was stopped by " + signal_name(outcome.stop_signal));
      return outcome.exit_code();
    }
    if (!outcome.recalled.empty() && !outcome.first_failure) say("ranks were stopped: " + outcome.recalled);
    bool again = false;
    if (outcome.first_failure)
      again = agent.ended("failed", blame_kind(*outcome.ranks[*outcome.first_failure].end), outcome.exit_code(),
                          what_failed(outcome, job.world_size));
    else again = agent.ended(outcome.recalled.empty() ? "done" : "stopped", 0, 0, "");
    if (!again) break;
  }
  // What failed here has been reported; what did not happen here is said in one line.
  if (agent.closed().code != 0)
    std::fprintf(stderr, "accelerate launch: the job has ended: %s\n", agent.closed().why.c_str());
  return static_cast<int>(agent.closed().code);
}

}  // namespace accelerate::launcher
