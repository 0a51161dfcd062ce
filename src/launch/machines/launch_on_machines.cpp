#include "launch/machines/launch_on_machines.hpp"

#include <fmt/format.h>

#include "launch/job/job.hpp"
#include "launch/machines/agent.hpp"
#include "launch/supervise/log_files.hpp"
#include "launch/supervise/report.hpp"
#include "launch/supervise/supervisor.hpp"
#include "launch/system/output.hpp"
#include "launch/system/process.hpp"
#include "utils/saved_exit_code.hpp"

namespace accelerate::launcher {
namespace {

/// Tells the others how the ranks ended here. @return whether there is another round.
bool tell_end(Agent& agent, const Outcome& outcome, int64_t world_size) {
  if (outcome.saved())
    return agent.ended("failed", 1, kSavedExitCode,
                       fmt::format("its ranks have ended with exit code {}", kSavedExitCode));
  if (!outcome.first_failure) return agent.ended(outcome.recalled.empty() ? "done" : "stopped", 0, 0, "");
  const RankRecord& rank = outcome.ranks[*outcome.first_failure];
  return agent.ended("failed", blame_kind(*rank.end), outcome.exit_code(),
                     fmt::format("rank {} of {} {}", rank.rank, world_size, describe(*rank.end)));
}

}  // namespace

int launch_on_machines(Job& job, const Host& host, const std::vector<std::string>& command, Monitor* monitor) {
  const auto say = [&](const std::string& line) {
    if (!job.quiet()) say_on_stderr(line);
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
      say(fmt::format("round {}: machine {} of {}, ranks from {} of {} (restart {} of {})", round->number,
                      round->group_rank, job.num_machines, round->first_rank, job.world_size, round->restarts,
                      job.max_restarts));
    const LogFiles logs(job);
    if (job.attempt == 0 && !logs.folder().empty()) say("log files are in " + logs.folder().string());
    const Outcome outcome = supervise({.job = job,
                                       .host = host,
                                       .logs = logs,
                                       .commands = {command},
                                       .say = report,
                                       .peers = &agent,
                                       .monitor = monitor});
    hand_on_error_file(job, host, logs, outcome);
    if (outcome.stop_signal) {
      agent.leave("its launcher was stopped by " + signal_name(outcome.stop_signal) +
                      (outcome.saved() ? ", and its ranks have saved a checkpoint" : ""),
                  outcome.exit_code());
      return outcome.exit_code();
    }
    if (!outcome.recalled.empty() && !outcome.first_failure) say("ranks were stopped: " + outcome.recalled);
    if (!tell_end(agent, outcome, job.world_size)) break;
  }
  // A failure on this machine has been reported; one that was elsewhere is said in one line.
  if (agent.closed().code != 0) say_on_stderr("the job has ended: " + agent.closed().why);
  return static_cast<int>(agent.closed().code);
}

}  // namespace accelerate::launcher
