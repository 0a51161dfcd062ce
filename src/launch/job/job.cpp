#include "launch/job/job.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>

#include "launch/job/deepspeed_machines.hpp"
#include "launch/job/host.hpp"
#include "launch/job/program_file.hpp"
#include "launch/job/require.hpp"
#include "launch/job/streams.hpp"

namespace accelerate::launcher {
namespace {

std::string new_run_id(int64_t machine_rank) {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y%m%d-%H%M%S", &utc);
  return fmt::format("{}_machine{}_{}", text, machine_rank, ::getpid());
}

std::chrono::milliseconds read_seconds(const Settings& s, const char* name) {
  const double seconds = s[name].get<double>();
  require(seconds >= 0 && seconds < 1e6, "--{} is a number of seconds from 0 to 999999", name);
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

/// Checks that apply to every kind of job.
void check_ranges(const Settings& s) {
  require(s.integer("num_cpu_threads_per_process").value_or(1) >= 1,
          "--num_cpu_threads_per_process must be at least 1");
  require(s.integer("gradient_accumulation_steps").value_or(1) >= 1,
          "--gradient_accumulation_steps must be at least 1");
  const int64_t port = s.integer("monitor_port").value_or(0);
  require(port >= 0 && port <= 65535, "--monitor_port is {}, expected 1 to 65535, or 0 for any free one", port);
  if (const auto& seconds = s["monitor_seconds"]; !seconds.is_null())
    require(seconds.get<double>() >= 0.05 && seconds.get<double>() <= 86400,
            "--monitor_seconds is {}, expected a number of seconds from 0.05 to 86400", s.text("monitor_seconds"));
  if (const auto& peak = s["monitor_peak_flops"]; !peak.is_null())
    require(peak.get<double>() >= 1, "--monitor_peak_flops is {}, expected floating-point operations a second, as 2e11",
            s.text("monitor_peak_flops"));
  require(s["max_restarts"].get<int64_t>() >= 0, "--max_restarts can't be negative");
}

/// Only what this library's programs are told by this launcher comes back to it.
void check_receipts(const Job& job) {
  const Settings& s = job.settings;
  require(!s.on("json") || !s.text("receipts").empty(), "--json says how --receipts are shown: give --receipts, too");
  if (s.text("receipts").empty()) return;
  require(job.starter == Job::Starter::launcher && s.launcher() != Launcher::sagemaker &&
              s.launcher() != Launcher::deepspeed,
          "--receipts come from C++ processes that this launcher starts itself, and this job's are started by another "
          "program (DeepSpeed, PyTorch/XLA, mpirun, Amazon SageMaker, or launchers of --hostfile): leave it out; in "
          "programs of this library, ACCELERATE_RECEIPTS=1 prints them at the end of training");
}

/// Options after the program are the program's, and look as if the launcher had taken them.
void remark_on_swapped_options(Job& job) {
  constexpr std::array kOurs = {"--num_processes", "--num_machines",    "--machine_rank",      "--multi_gpu",
                                "--use_fsdp",      "--main_process_ip", "--main_process_port", "--use_deepspeed"};
  for (size_t i = 1; i < job.command.size(); ++i) {
    std::string word = job.command[i].substr(0, job.command[i].find('='));
    std::replace(word.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(2, word.size())), word.end(), '-', '_');
    if (std::any_of(kOurs.begin(), kOurs.end(), [&](const char* ours) { return word == ours; }))
      job.remarks.push_back(
          fmt::format("{} behind the program goes to the program; the launcher's own options stand in front of it",
                      job.command[i]));
  }
}

void check_streams(const Job& job) {
  for (const char* name : {"tee", "redirects"})
    parse_streams(fmt::format("--{}", name), job.settings.text(name), job.local_world_size);
}

/// SageMaker's machines are its own business.
void check_sagemaker(const Settings& s) {
  require(!s.on("monitor") && !s.integer("monitor_port"),
          "--monitor shows processes that this launcher starts, and those of a SageMaker job are started elsewhere: "
          "leave it out; the job's status is followed anyway");
}

/// PyTorch/XLA starts the processes of a TPU and knows where the others are.
void plan_tpu(Job& job) {
  const Settings& s = job.settings;
  require(job.num_machines == 1,
          "--num_machines is {}, but the machines of a TPU pod are counted by Google: leave it out, and give "
          "--tpu_cluster to start on all of them",
          s.text("num_machines"));
  require(s.text("hostfile").empty(),
          "--hostfile can't be used with --tpu: --tpu_cluster starts the program on all machines of a pod");
  job.starter = s.on("tpu_use_cluster") ? Job::Starter::pod : Job::Starter::xla;
  if (job.starter != Job::Starter::pod) return;
  const config::Value& flags = s["vm"];
  const config::Value& workers = flags.is_array() && !flags.empty() ? flags : s["tpu_vm"];
  if (workers.is_array())
    for (const auto& worker : workers) job.pod_workers.push_back(config::python_text(worker));
  job.world_size = job.local_world_size = std::max<int64_t>(1, static_cast<int64_t>(job.pod_workers.size()));
}

/// A launcher on each machine of a hostfile takes the place of a rank.
void plan_hostfile(Job& job, const std::string& hostfile, bool c10d) {
  const Settings& s = job.settings;
  job.remote = filter_hosts(read_hostfile("--hostfile", hostfile), s.text("include"), s.text("exclude"));
  for (const char* name : {"num_machines", "num_processes", "machine_rank", "processes_per_machine"})
    require(s.source(name) != ValueSource::flag,
            "--hostfile says how many machines and processes there are: leave out --num_machines, --num_processes, "
            "--processes_per_machine and --machine_rank, or choose with --include or --exclude");
  require(!c10d, "--hostfile starts a fixed set of machines: leave out --rdzv_backend c10d");
  job.remote_shell = s.text("remote_shell");
  job.start_launchers();
}

void check_several_machines(const Job& job, bool c10d) {
  const Settings& s = job.settings;
  const std::string several =
      fmt::format(" must be given when --num_machines is more than 1 (it is {})", job.num_machines);
  require(s.integer("machine_rank").has_value() || c10d,
          "--machine_rank{}: 0 on the main machine, then 1, 2, ... on the others", several);
  require(!s.text("main_process_ip").empty(), "--main_process_ip{}: the address of machine 0 as the others reach it",
          several);
  require(job.main_port != 0, "--main_process_port{}: a port that is free on machine 0, the same on all machines",
          several);
  require(job.min_machines == job.num_machines || c10d,
          "--num_machines is {}:{}, and a job whose machines come and go needs --rdzv_backend c10d", job.min_machines,
          job.num_machines);
  require(s.integer("processes_per_machine") || job.world_size % job.num_machines == 0,
          "--num_processes counts the processes of all machines together: {} can't be shared equally by {} machines. "
          "Use a multiple of {}",
          job.world_size, job.num_machines, job.num_machines);
}

/// One process in a job of another launcher's, which knows where the others are.
void plan_place(Job& job, const LaunchPlace& place) {
  job.place = place;
  job.world_size = place.world_size;
  job.local_world_size = 1;
  job.max_restarts = 0;  // the others would not start again
  job.main_ip = place.address;
  job.main_port = place.port;
}

/// Kinds of training of one process: there a number in a file, or of GPUs, is no wish for several.
bool is_for_one_process(const Job& job) {
  const Settings& s = job.settings;
  return s.launcher() == Launcher::simple && s.source("num_processes") != ValueSource::flag &&
         s.text("distributed_type") != "MULTI_CPU" && job.num_machines == 1 && !s.integer("processes_per_machine") &&
         s.text("mpirun_hostfile").empty() && s.text("hostfile").empty();
}

/// Ranks, on this machine alone or on several that meet.
void plan_ranks(Job& job, const Host& host) {
  const Settings& s = job.settings;
  if (const auto& place = s.place()) return plan_place(job, *place);
  const std::string backend = s.text("rdzv_backend");
  const bool c10d = backend == "c10d";
  require(
      backend == "static" || c10d,
      "--rdzv_backend is '{}', expected static or c10d: the others need servers that this launcher has no client for",
      backend);
  job.rendezvous = parse_rendezvous_conf(s.text("rdzv_conf"), !c10d);
  for (const auto& key : job.rendezvous.unused) job.remarks.push_back(key);
  // As the reference: where it starts several machines through torchrun's protocol, the port has a default.
  const int64_t usual = job.num_machines > 1 && s.launcher() != Launcher::simple ? 29500 : 0;
  job.main_port = s.integer("main_process_port").value_or(usual);
  require(job.main_port >= 0 && job.main_port <= 65535,
          "--main_process_port is {}, expected 1 to 65535, or 0 for any free one", job.main_port);
  job.world_size = std::max<int64_t>(1, s.num_processes());
  if (is_for_one_process(job) && job.world_size > 1) {
    if (s.source("num_processes") == ValueSource::file)
      job.remarks.push_back(
          fmt::format("the config file {} says {} processes, and what it is for ({}) has one, which is started; "
                      "--num_processes {} starts them all",
                      job.config_file.string(), job.world_size,
                      s.on("cpu") ? "--cpu" : "distributed_type " + s.text("distributed_type"), job.world_size));
    job.world_size = 1;
  }
  constexpr int64_t kMostRanks = 1'000'000, kMostHere = 16'384;  // more would fill the memory before they fail
  require(job.world_size <= kMostRanks && s.num_processes() >= 0 && job.num_machines <= kMostRanks,
          "--num_processes is {} on {} machines, expected at most {} of each", s.num_processes(), job.num_machines,
          kMostRanks);
  if (job.num_machines > 1) job.machine_rank = job.rendezvous.rank.value_or(s.integer("machine_rank").value_or(0));
  else if (s.source("machine_rank") == ValueSource::flag && s.integer("machine_rank").value_or(0) != 0)
    job.remarks.push_back("--machine_rank " + s.text("machine_rank") + " has no effect with one machine");
  if (job.num_machines == 1 && job.starter == Job::Starter::launcher && s.text("mpirun_hostfile").empty()) {
    if (c10d && s.source("rdzv_backend") == ValueSource::flag)
      job.remarks.emplace_back("--rdzv_backend c10d has no effect with one machine, which meets nobody");
    if (job.world_size == 1 && s.source("main_process_ip") == ValueSource::flag)
      job.remarks.emplace_back("--main_process_ip has no effect with one process, which meets nobody");
  }
  if (deepspeed_starts_machines(s) && !is_python_program(job.command, s, host))
    return plan_deepspeed_machines(job, host);
  if (const std::string hostfile = s.text("hostfile"); !hostfile.empty()) plan_hostfile(job, hostfile, c10d);
  const auto here = s.integer("processes_per_machine");
  require(here.value_or(1) >= 1, "--processes_per_machine must be at least 1");
  if (job.num_machines > 1) check_several_machines(job, c10d);
  require(job.machine_rank >= 0 && job.machine_rank < job.num_machines,
          "--machine_rank is {}, expected 0 to {} (--num_machines is {})", job.machine_rank, job.num_machines - 1,
          job.num_machines);
  job.local_world_size = here && job.starter != Job::Starter::hostfile ? *here : job.world_size / job.num_machines;
  require(job.local_world_size <= kMostHere || job.starter == Job::Starter::hostfile,
          "{} processes are to be started on this machine, expected at most {}", job.local_world_size, kMostHere);
  if (job.starter == Job::Starter::launcher && s.launcher() == Launcher::simple && !s.text("mpirun_hostfile").empty())
    job.starter = Job::Starter::mpirun;
  if (job.starter == Job::Starter::launcher && deepspeed_starts_machines(s)) job.starter = Job::Starter::deepspeed;
  if (job.starter == Job::Starter::mpirun || job.starter == Job::Starter::deepspeed)
    job.world_size = job.local_world_size = job.num_machines = job.min_machines = 1, job.machine_rank = 0;
  if (const std::string ip = s.text("main_process_ip"); !ip.empty()) job.main_ip = ip;
}

}  // namespace

Job make_job(const LaunchRequest& request, const Host& host) {
  require(!request.command.empty() && !request.command.front().empty(),
          "no program was given. Name it after the options: accelerate launch [options] program [arguments]");
  Job job{.command = request.command, .config_file = request.config_file, .settings = Settings(request, host)};
  const Settings& s = job.settings;
  job.monitor_interval = read_seconds(s, "monitor_interval");
  job.grace = read_seconds(s, "grace_seconds");
  check_ranges(s);
  job.max_restarts = s["max_restarts"].get<int64_t>();
  if (s.launcher() == Launcher::sagemaker) {
    check_sagemaker(s);
  } else {
    job.num_machines = s.num_machines();
    job.min_machines = s.min_machines();
    require(job.num_machines >= 1, "--num_machines is {}, but at least 1 machine is needed", s.text("num_machines"));
    if (s.launcher() == Launcher::tpu) plan_tpu(job);
    else plan_ranks(job, host);
    check_streams(job);
  }
  check_receipts(job);
  remark_on_swapped_options(job);
  job.run_id = new_run_id(job.machine_rank);
  return job;
}

}  // namespace accelerate::launcher
