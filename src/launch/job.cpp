#include "launch/job.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <ctime>
#include <fstream>
#include <set>
#include <sstream>

#include "accelerate/config.hpp"
#include "accelerate/utils/error.hpp"
#include "launch/hostfile.hpp"
#include "launch/log_files.hpp"
#include "launch/tpu.hpp"

extern char** environ;

namespace accelerate::launcher {
namespace {

int64_t count_physical_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  std::set<std::string> cores;  // hyper-threads of one core have the same list of siblings
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::string siblings = "cpu" + std::to_string(cpu);
    std::ifstream("/sys/devices/system/cpu/" + siblings + "/topology/thread_siblings_list") >> siblings;
    cores.insert(siblings);
  }
  return std::max<int64_t>(1, static_cast<int64_t>(cores.size()));
}

std::string new_run_id(int64_t machine_rank) {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y%m%d-%H%M%S", &utc);
  return std::string(text) + "_machine" + std::to_string(machine_rank) + "_" + std::to_string(::getpid());
}

void require(bool condition, const std::string& message) {
  if (!condition) throw ConfigError(message);
}

std::chrono::milliseconds checked_milliseconds(const std::string& option, double seconds) {
  require(seconds >= 0 && seconds < 1e6, option + " is a number of seconds from 0 to 999999");
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000 + 0.5));
}

}  // namespace

Host Host::current() {
  Host host{.physical_cores = count_physical_cores(), .environment = {}};
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text(*entry);
    if (const size_t equals = text.find('='); equals != std::string_view::npos)
      host.environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  host.accelerators = count_accelerators();
  return host;
}

std::optional<int64_t> Host::number(const std::string& name) const {
  const auto found = environment.find(name);
  if (found == environment.end()) return std::nullopt;
  int64_t value = 0;
  const auto& text = found->second;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

Job make_job(const LaunchOptions& options, const Host& host) {
  require(!options.command.empty() && !options.command.front().empty(),
          "no program was given. Name it after the options: accelerate launch [options] program [arguments]");
  Job job{.options = options, .settings = Settings(options, host)};
  const Settings& s = job.settings;
  auto& o = job.options;
  o.module = s.on("module");
  o.no_python = s.on("no_python");
  o.cpu = s.computes_on_cpu();
  o.debug = s.on("debug");
  o.quiet = s.on("quiet");
  o.dry_run = s.on("dry_run");
  o.mixed_precision = s.text("mixed_precision");
  o.log_dir = s.text("log_dir");
  o.redirects = s.text("redirects");
  o.tee = s.text("tee");
  o.role = s.text("role");
  o.max_restarts = s["max_restarts"].get<int64_t>();
  o.gradient_accumulation_steps = s.integer("gradient_accumulation_steps");
  o.main_process_ip = s.text("main_process_ip");
  o.monitor_interval = checked_milliseconds("--monitor_interval", s["monitor_interval"].get<double>());
  o.grace = checked_milliseconds("--grace_seconds", s["grace_seconds"].get<double>());
  require(s.integer("num_cpu_threads_per_process").value_or(1) >= 1,
          "--num_cpu_threads_per_process must be at least 1");
  require(o.gradient_accumulation_steps.value_or(1) >= 1, "--gradient_accumulation_steps must be at least 1");
  if (const auto port = s.integer("monitor_port"))
    require(*port >= 0 && *port <= 65535,
            "--monitor_port is " + std::to_string(*port) + ", expected 1 to 65535, or 0 for any free one");
  if (const auto& seconds = s["monitor_seconds"]; !seconds.is_null())
    require(seconds.get<double>() >= 0.05 && seconds.get<double>() <= 86400,
            "--monitor_seconds is " + s.text("monitor_seconds") + ", expected a number of seconds from 0.05 to 86400");
  require(o.max_restarts >= 0, "--max_restarts can't be negative");

  if (s.launcher() == Launcher::sagemaker) {  // whose machines are its own business
    require(!s.on("monitor") && !s.integer("monitor_port"),
            "--monitor shows processes that this launcher starts, and those of a SageMaker job are started elsewhere: "
            "leave it out; the job's status is followed anyway");
    job.run_id = new_run_id(0);
    return job;
  }
  job.num_machines = s.num_machines();
  job.min_machines = s.min_machines();
  require(job.num_machines >= 1, "--num_machines is " + s.text("num_machines") + ", but at least 1 machine is needed");
  if (s.launcher() == Launcher::tpu) {
    // PyTorch/XLA starts the processes and knows where the others are.
    require(job.num_machines == 1, "--num_machines is " + s.text("num_machines") +
                                       ", but the machines of a TPU pod are counted by Google: leave it out, and give "
                                       "--tpu_cluster to start on all of them");
    require(s.text("hostfile").empty(),
            "--hostfile can't be used with --tpu: --tpu_cluster starts the program on all machines of a pod");
    job.starter = s.on("tpu_use_cluster") ? Job::Starter::pod : Job::Starter::xla;
    if (job.starter == Job::Starter::pod)
      job.world_size = job.local_world_size = static_cast<int64_t>(num_pod_commands(s));
    job.xla_starter = XlaStarter::kName;
    parse_streams("--tee", o.tee, job.local_world_size);
    parse_streams("--redirects", o.redirects, job.local_world_size);
    job.run_id = new_run_id(0);
    return job;
  }
  const std::string backend = s.text("rdzv_backend");
  require(backend == "static" || backend == "c10d",
          "--rdzv_backend is '" + backend +
              "', expected static or c10d: the others need servers that this launcher has no client for");
  const bool c10d = backend == "c10d";
  job.rendezvous = parse_rendezvous_conf(s.text("rdzv_conf"), !c10d);
  // As the reference: where it starts several machines through torchrun's protocol, the port has a default.
  const int64_t usual = job.num_machines > 1 && s.launcher() != Launcher::simple ? 29500 : 0;
  const int64_t port = s.integer("main_process_port").value_or(usual);
  require(port >= 0 && port <= 65535,
          "--main_process_port is " + std::to_string(port) + ", expected 1 to 65535, or 0 for any free one");
  job.world_size = std::max<int64_t>(1, s.num_processes());
  job.machine_rank = job.rendezvous.rank.value_or(s.integer("machine_rank").value_or(0));
  if (const std::string hostfile = s.text("hostfile"); !hostfile.empty()) {
    std::ifstream in(hostfile);
    require(static_cast<bool>(in), "--hostfile " + hostfile + " can't be read: " + std::strerror(errno));
    job.remote = filter_hosts(parse_hostfile({std::istreambuf_iterator<char>(in), {}}, hostfile), s.text("include"),
                              s.text("exclude"));
    require(s.source("num_machines") != Source::flag && s.source("num_processes") != Source::flag &&
                s.source("machine_rank") != Source::flag && s.source("processes_per_machine") != Source::flag,
            "--hostfile says how many machines and processes there are: leave out --num_machines, --num_processes, "
            "--processes_per_machine and --machine_rank, or choose with --include or --exclude");
    require(!c10d, "--hostfile starts a fixed set of machines: leave out --rdzv_backend c10d");
    job.starter = Job::Starter::hostfile;
    job.num_machines = job.min_machines = 1;
    job.machine_rank = 0;
    job.world_size = static_cast<int64_t>(job.remote.size());
  }
  const auto here = s.integer("processes_per_machine");
  require(here.value_or(1) >= 1, "--processes_per_machine must be at least 1");
  if (job.num_machines > 1) {
    const std::string several =
        " must be given when --num_machines is more than 1 (it is " + std::to_string(job.num_machines) + ")";
    require(s.integer("machine_rank").has_value() || c10d,
            "--machine_rank" + several + ": 0 on the main machine, then 1, 2, ... on the others");
    require(!o.main_process_ip.empty(),
            "--main_process_ip" + several + ": the address of machine 0 as the others reach it");
    require(port != 0,
            "--main_process_port" + several + ": a port that is free on machine 0, the same on all machines");
    require(job.min_machines == job.num_machines || c10d,
            "--num_machines is " + std::to_string(job.min_machines) + ":" + std::to_string(job.num_machines) +
                ", and a job whose machines come and go needs --rdzv_backend c10d");
    require(here || job.world_size % job.num_machines == 0,
            "--num_processes counts the processes of all machines together: " + std::to_string(job.world_size) +
                " can't be shared equally by " + std::to_string(job.num_machines) + " machines. Use a multiple of " +
                std::to_string(job.num_machines));
  }
  require(job.machine_rank >= 0 && job.machine_rank < job.num_machines,
          "--machine_rank is " + std::to_string(job.machine_rank) + ", expected 0 to " +
              std::to_string(job.num_machines - 1) + " (--num_machines is " + std::to_string(job.num_machines) + ")");
  job.local_world_size = here && job.starter != Job::Starter::hostfile ? *here : job.world_size / job.num_machines;
  if (job.starter == Job::Starter::launcher && s.launcher() == Launcher::simple && !s.text("mpirun_hostfile").empty())
    job.starter = Job::Starter::mpirun;
  if (job.starter == Job::Starter::launcher && s.launcher() == Launcher::deepspeed && job.num_machines > 1 &&
      s.text("deepspeed_multinode_launcher") != "standard")
    job.starter = Job::Starter::deepspeed;
  if (job.starter == Job::Starter::mpirun || job.starter == Job::Starter::deepspeed)
    job.world_size = job.local_world_size = job.num_machines = job.min_machines = 1, job.machine_rank = 0;
  parse_streams("--tee", o.tee, job.local_world_size);
  parse_streams("--redirects", o.redirects, job.local_world_size);
  if (!o.main_process_ip.empty()) job.main_ip = o.main_process_ip;
  job.main_port = port;
  job.run_id = new_run_id(job.machine_rank);
  return job;
}

}  // namespace accelerate::launcher
