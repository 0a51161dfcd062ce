#include "launch/starters/pod.hpp"

#include <string_view>

#include "launch/job/environment.hpp"
#include "launch/job/host.hpp"
#include "launch/job/job.hpp"
#include "launch/job/outcome.hpp"
#include "launch/job/require.hpp"
#include "launch/starters/shell_text.hpp"
#include "launch/starters/xla.hpp"
#include "launch/supervise/log_files.hpp"
#include "launch/supervise/supervisor.hpp"
#include "launch/system/process.hpp"

namespace accelerate::launcher {
namespace {

/// The command for a worker, which a shell there reads.
std::string worker_command(const Job& job) {
  const Settings& s = job.settings;
  std::vector<std::string> words;
  if (s.on("tpu_use_sudo")) words.emplace_back("sudo");
  words.emplace_back("env");  // behind sudo, which would drop the variables
  for (const auto& [name, value] : protocol(s, Host{})) words.push_back(fmt::format("{}={}", name, value));
  words.emplace_back("ACCELERATE_IN_TPU_POD=1");
  for (const char* list : {"tpu_env", "env"})  // of two values the last one counts
    if (s[list].is_array())
      for (const auto& entry : s[list]) {
        const std::string text = config::python_text(entry);
        require(text.find('=') != std::string::npos && text.front() != '=', "{} has '{}', expected NAME=VALUE",
                std::string_view(list) == "env" ? "--env" : "tpu_env of the config file", text);
        words.push_back(text);
      }
  // A worker is one machine for itself, whose TPU chips PyTorch/XLA makes part of the pod.
  words.insert(words.end(), {"accelerate-launch", "--tpu", "--no_tpu_cluster", "--num_machines", "1",
                             "--mixed_precision", "no", "--dynamo_backend", "no"});
  if (s.num_processes() > 0) words.insert(words.end(), {"--num_processes", std::to_string(s.num_processes())});
  words.insert(words.end(), {"--main_training_function", training_function(job)});
  if (job.settings.on("module")) words.emplace_back("--module");
  words.insert(words.end(), job.command.begin(), job.command.end());
  return shell_text(words);
}

/// The report on the end, in the words of workers.
std::string report_pod(const Job& job, const LogFiles&, const Outcome& outcome) {
  if (outcome.stop_signal && job.quiet()) return "";
  if (outcome.stop_signal)
    return fmt::format("accelerate launch: stopped by {}; what runs on the pod's workers may go on.\n",
                       signal_name(outcome.stop_signal));
  if (!outcome.first_failure) return "";
  const RankRecord& record = outcome.ranks[*outcome.first_failure];
  return fmt::format("accelerate launch: gcloud for {} {}\n",
                     job.pod_workers.empty() ? "the workers of " + job.settings.text("tpu_name")
                                             : job.pod_workers[static_cast<size_t>(record.rank)],
                     describe(*record.end));
}

}  // namespace

std::vector<std::vector<std::string>> pod_commands(const Job& job) {
  require_python_program(job);
  const std::string zone = job.settings.text("tpu_zone"), command = worker_command(job);
  const auto finished = [&](std::vector<std::string> words) {
    if (!zone.empty()) words.insert(words.end(), {"--zone", zone});
    words.insert(words.end(), {"--command", command});
    return words;
  };
  std::vector<std::vector<std::string>> commands;
  for (const auto& worker : job.pod_workers) commands.push_back(finished({"gcloud", "compute", "ssh", worker}));
  if (!commands.empty()) return commands;
  const std::string name = job.settings.text("tpu_name");
  require(!name.empty(),
          "--tpu_cluster starts the program on all workers of a pod, whose name is not known: `accelerate config` asks "
          "for tpu_name and tpu_zone");
  auto words = finished({"gcloud", "alpha", "compute", "tpus", "tpu-vm", "ssh", name});
  words.insert(words.end(), {"--worker", "all"});
  return {words};
}

int launch_on_pod(const Job& job, const Host& host, Monitor* monitor) {
  auto commands = pod_commands(job);
  const std::string gcloud = host.find_in_path("gcloud");
  if (gcloud.empty())
    raise<NotBuiltError>(
        "the workers of a TPU pod are reached by Google Cloud's program gcloud, which is not in PATH. Install it "
        "(Google Cloud CLI) and log in, or run this on each worker with --no_tpu_cluster");
  for (auto& words : commands) words.front() = gcloud;
  const LogFiles logs(job);
  return supervise(
             {.job = job, .host = host, .logs = logs, .commands = commands, .say = report_pod, .monitor = monitor})
      .exit_code();
}

}  // namespace accelerate::launcher
