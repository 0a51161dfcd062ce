#include "accelerate/launch.hpp"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "input/read_file.hpp"
#include "launch/job/environment.hpp"
#include "launch/job/host.hpp"
#include "launch/job/job.hpp"
#include "launch/machines/launch_on_machines.hpp"
#include "launch/monitor/monitor.hpp"
#include "launch/request.hpp"
#include "launch/starters/deepspeed.hpp"
#include "launch/starters/pod.hpp"
#include "launch/starters/program.hpp"
#include "launch/starters/remote.hpp"
#include "launch/starters/sagemaker.hpp"
#include "launch/starters/shell_text.hpp"
#include "launch/starters/xla.hpp"
#include "launch/supervise/log_files.hpp"
#include "launch/supervise/receipts_desk.hpp"
#include "launch/supervise/report.hpp"
#include "launch/supervise/supervisor.hpp"
#include "launch/system/output.hpp"
#include "launch/system/ports.hpp"

namespace accelerate {
namespace {

using namespace launcher;

/// A line on stderr, unless the user wants none.
void say(const Job& job, const std::string& line) {
  if (!job.quiet()) say_on_stderr(line);
}

void print_environment(const Job& job, const Host& host) {
  for (const auto& [name, value] : build_environment(job, host, 0))
    std::printf("  %s=%s\n", name.c_str(), value.c_str());
}

void print_tpu_plan(const Job& job, const Host& host) {
  const bool pod = job.starter == Job::Starter::pod;
  std::printf("launcher   tpu%s\n", pod ? ", on a pod" : "; PyTorch/XLA starts a process for each chip");
  for (const auto& words : pod ? pod_commands(job) : std::vector<std::vector<std::string>>{command_line(job, host)})
    std::printf("command    %s\n", shell_text(words).c_str());
  if (pod) return;
  std::printf("environment:\n  FORK_LAUNCHED=1\n");
  print_environment(job, host);
}

/// Prints which program starts the ranks, of which this launcher knows no more.
void print_started_by(const char* starter, const Job& job) {
  const int64_t all = job.settings.num_processes(), each = all / std::max<int64_t>(1, job.settings.num_machines());
  std::printf("launcher   %s, which starts the processes\nprocesses  %s\n", starter,
              !job.remote.empty() ? fmt::format("{} on {} machines", all_slots(job.remote), job.remote.size()).c_str()
              : all > 0           ? fmt::format("{}, {} on each machine", all, each).c_str()
                                  : "1 on each machine");
}

/// For people, and for tests: what would be started where.
void print_plan(const Job& job, const Host& host) {
  if (job.starter == Job::Starter::pod || job.starter == Job::Starter::xla) return print_tpu_plan(job, host);
  const char* names[] = {"simple", "torchrun", "deepspeed"};
  if (job.starter == Job::Starter::mpirun) print_started_by("mpirun", job);
  else if (job.starter == Job::Starter::deepspeed) print_started_by("deepspeed", job);
  else if (job.starter == Job::Starter::srun) print_started_by("srun", job);
  else
    std::printf("launcher   %s\nprocesses  %lld of %lld on machine %lld of %lld\n",
                names[static_cast<int>(job.settings.launcher())], static_cast<long long>(job.local_world_size),
                static_cast<long long>(job.world_size), static_cast<long long>(job.machine_rank),
                static_cast<long long>(job.num_machines));
  if (const std::string hosts = job.settings.text("mpirun_hostfile");
      job.starter == Job::Starter::mpirun && job.remote.empty() && !is_there(hosts))
    std::printf("hostfile   %s does not exist here, without which a start is refused\n", hosts.c_str());
  if (job.main_ip.empty()) std::printf("meeting at the first machine that Slurm gives\n");
  else if (job.needs_port() || job.place)
    std::printf("meeting at %s:%s\n", job.main_ip.c_str(),
                job.main_port ? std::to_string(job.main_port).c_str() : "a free port");
  if (job.starter == Job::Starter::hostfile) {
    for (size_t i = 0; i < job.remote.size(); ++i)
      std::printf("machine %zu  %s\n", i, fmt::format("{}", fmt::join(remote_command(job, host, i), " ")).c_str());
    return;
  }
  std::printf("command    %s\nenvironment of local rank 0:\n",
              fmt::format("{}", fmt::join(command_line(job, host), " ")).c_str());
  print_environment(job, host);
}

/// Descriptors 0, 1 and 2 must exist, or a pipe of ours would become somebody's standard stream.
void open_standard_streams() {
  for (int fd = ::open("/dev/null", O_RDWR); fd >= 0; fd = ::dup(fd))
    if (fd > STDERR_FILENO) {
      ::close(fd);
      break;
    }
}

/// Two jobs with one config file, which names the port: nobody but their own ranks needs to know it.
std::string take_other_port(Job& job) {
  const int64_t busy = job.main_port;
  job.main_port = choose_port();
  return fmt::format("the port {} is in use, probably by another training run: the processes meet at {}", busy,
                     job.main_port);
}

/// Ranks of this machine alone, or one program that starts ranks: again and again while restarts are left.
int launch_here(Job& job, const Host& host, Monitor* monitor) {
  const bool any_port = job.main_port == 0;
  const bool alone = job.num_machines == 1 && job.starter == Job::Starter::launcher;
  for (;; ++job.attempt) {
    if (job.needs_port() && job.remote.empty()) {  // else the port is one of another machine
      if (any_port) job.main_port = choose_port();
      else if (alone && is_port_busy(job.main_port)) say(job, take_other_port(job));
      else if (job.machine_rank == 0) require_free_port(job.main_port);
    }
    if (job.starter == Job::Starter::deepspeed && job.attempt == 0)
      for (const auto& name : add_to_deepspeed_env(protocol(job.settings, host), host))
        say(job, name + " can't be passed to other machines by ~/.deepspeed_env");
    const LogFiles logs(job);
    if (job.attempt == 0 && !logs.folder().empty()) say(job, "log files are in " + logs.folder().string());
    const Outcome outcome = supervise({.job = job,
                                       .host = host,
                                       .logs = logs,
                                       .commands = {command_line(job, host)},
                                       .say = report,
                                       .monitor = monitor});
    hand_on_error_file(job, host, logs, outcome);
    if (outcome.exit_code() == 0 || outcome.stop_signal) return outcome.exit_code();
    if (job.attempt >= job.max_restarts) {
      if (job.max_restarts > 0) say(job, fmt::format("no restart is left of {}: giving up", job.max_restarts));
      return outcome.exit_code();
    }
    say(job, fmt::format("starting all processes again (restart {} of {})", job.attempt + 1, job.max_restarts));
  }
}

}  // namespace

int launch(const LaunchOptions& options) {
  open_standard_streams();
  const char* tether = std::getenv("ACCELERATE_LAUNCH_TETHER");
  const std::string token = tether ? take_tether(std::string_view(tether) == "token") : "";
  const Host host = Host::current();
  Job job = make_job(request_of(options), host);
  if (!token.empty()) job.rendezvous.token = token;
  for (const auto& remark : job.settings.remarks()) say(job, remark);
  for (const auto& remark : job.remarks) say(job, remark);
  const Launcher launcher = job.settings.launcher();
  if (launcher == Launcher::sagemaker) return launch_on_sagemaker(job, host);
  if (job.settings.on("dry_run")) return print_plan(job, host), 0;
  std::vector<std::string> command;
  if (job.starts_ranks()) command = command_line(job, host);  // complain before anything is created
  const auto monitor = Monitor::create(job);
  if (monitor && !monitor->url().empty())
    say(job, fmt::format("the monitor's page is {}{}", monitor->url(),
                         monitor->open_to_others() ? ", which other machines can reach: it asks for no password" : ""));
  if (job.starter == Job::Starter::pod) return launch_on_pod(job, host, monitor.get());
  if (job.starter == Job::Starter::hostfile) return launch_by_hostfile(job, host, monitor.get());
  std::optional<XlaStarter> xla;
  if (job.starter == Job::Starter::xla) xla.emplace(job);
  if (job.settings.threads_chosen() && launcher != Launcher::deepspeed && launcher != Launcher::tpu)
    say(job, fmt::format("OMP_NUM_THREADS={} for each process; --num_cpu_threads_per_process changes it",
                         job.settings.threads_per_process()));
  const ReceiptsDesk receipts(job);
  return receipts.close(job.needs_agent() ? launch_on_machines(job, host, command, monitor.get())
                                          : launch_here(job, host, monitor.get()));
}

}  // namespace accelerate
