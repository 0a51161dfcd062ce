#include "accelerate/launch.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "accelerate/utils/error.hpp"
#include "launch/deepspeed.hpp"
#include "launch/environment.hpp"
#include "launch/job.hpp"
#include "launch/log_files.hpp"
#include "launch/machines.hpp"
#include "launch/monitor/monitor.hpp"
#include "launch/ports.hpp"
#include "launch/program.hpp"
#include "launch/remote.hpp"
#include "launch/report.hpp"
#include "launch/sagemaker.hpp"
#include "launch/supervisor.hpp"
#include "launch/tpu.hpp"

namespace accelerate {
namespace {

using namespace launcher;

void say(const std::string& line) { std::fprintf(stderr, "accelerate launch: %s\n", line.c_str()); }

/// For people, and for tests: what would be started where.
void print_plan(const Job& job, const Host& host) {
  const char* names[] = {"simple", "torchrun", "deepspeed"};
  if (job.starter == Job::Starter::pod || job.starter == Job::Starter::xla) {
    std::printf("launcher   tpu%s\n",
                job.starter == Job::Starter::pod ? ", on a pod" : "; PyTorch/XLA starts a process for each chip");
    for (const auto& words : job.starter == Job::Starter::pod
                                 ? pod_commands(job)
                                 : std::vector<std::vector<std::string>>{command_line(job, host)})
      std::printf("command    %s\n", shell_text(words).c_str());
    if (job.starter == Job::Starter::pod) return;
    std::printf("environment:\n  FORK_LAUNCHED=1\n");
    for (const auto& [name, value] : build_environment(job, host, 0))
      std::printf("  %s=%s\n", name.c_str(), value.c_str());
    return;
  }
  std::printf("launcher   %s\nprocesses  %lld of %lld on machine %lld of %lld\n",
              names[static_cast<int>(job.settings.launcher())], static_cast<long long>(job.local_world_size),
              static_cast<long long>(job.world_size), static_cast<long long>(job.machine_rank),
              static_cast<long long>(job.num_machines));
  if (job.needs_port())
    std::printf("meeting at %s:%s\n", job.main_ip.c_str(),
                job.main_port ? std::to_string(job.main_port).c_str() : "a free port");
  if (job.starter == Job::Starter::hostfile) {
    for (size_t i = 0; i < job.remote.size(); ++i) {
      std::printf("machine %zu ", i);
      for (const auto& word : remote_command(job, host, i)) std::printf(" %s", word.c_str());
      std::printf("\n");
    }
    return;
  }
  std::printf("command   ");
  for (const auto& word : command_line(job, host)) std::printf(" %s", word.c_str());
  std::printf("\nenvironment of local rank 0:\n");
  for (const auto& [name, value] : build_environment(job, host, 0))
    std::printf("  %s=%s\n", name.c_str(), value.c_str());
}

}  // namespace

int launch(const LaunchOptions& options) {
  // Descriptors 0, 1 and 2 must exist, or a pipe of ours would become somebody's standard stream.
  for (int fd = ::open("/dev/null", O_RDWR); fd >= 0; fd = ::dup(fd))
    if (fd > STDERR_FILENO) {
      ::close(fd);
      break;
    }
  const char* tether = std::getenv("ACCELERATE_LAUNCH_TETHER");
  const std::string token = tether ? take_tether(std::string_view(tether) == "token") : "";
  const Host host = Host::current();
  Job job = make_job(options, host);
  if (!token.empty()) job.rendezvous.token = token;
  const bool quiet = job.options.quiet;
  if (!quiet)
    for (const auto& remark : job.settings.remarks()) say(remark);
  if (job.settings.launcher() == Launcher::sagemaker) return launch_on_sagemaker(job, host);
  if (job.options.dry_run) return print_plan(job, host), 0;
  if (job.starts_ranks()) command_line(job, host);  // complain before anything is created
  const auto monitor = Monitor::create(job);
  if (monitor && !quiet && !monitor->url().empty())
    say("the monitor's page is " + monitor->url() +
        (monitor->open_to_others() ? ", which other machines can reach: it asks for no password" : ""));
  if (job.starter == Job::Starter::pod) return launch_on_pod(job, host, monitor.get());
  if (job.starter == Job::Starter::hostfile) return launch_by_hostfile(job, host, monitor.get());
  std::optional<XlaStarter> starter;
  if (job.starter == Job::Starter::xla) job.xla_starter = starter.emplace().file();
  const bool any_port = job.main_port == 0;
  if (!quiet && job.settings.threads_chosen() && job.settings.launcher() != Launcher::deepspeed &&
      job.settings.launcher() != Launcher::tpu)
    say("OMP_NUM_THREADS=" + std::to_string(job.settings.threads_per_process()) +
        " for each process; --num_cpu_threads_per_process changes it");
  if (job.needs_agent()) return launch_on_machines(job, host, monitor.get());
  for (;; ++job.attempt) {
    if (job.needs_port()) {
      if (any_port) job.main_port = choose_port();
      else if (job.machine_rank == 0) require_free_port(job.main_port);
    }
    if (job.starter == Job::Starter::deepspeed && job.attempt == 0)
      for (const auto& name : add_to_deepspeed_env(protocol(job.settings, host), host))
        if (!quiet) say(name + " can't be passed to other machines by ~/.deepspeed_env");
    const LogFiles logs(job);
    if (!quiet && job.attempt == 0 && !logs.folder().empty()) say("log files are in " + logs.folder().string());
    const Outcome outcome = supervise(job, host, logs, report, nullptr, monitor.get());
    if (!outcome.first_failure || outcome.stop_signal || job.attempt >= job.options.max_restarts)
      return outcome.exit_code();
    if (!quiet)
      say("starting all processes again (restart " + std::to_string(job.attempt + 1) + " of " +
          std::to_string(job.options.max_restarts) + ")");
  }
}

}  // namespace accelerate
