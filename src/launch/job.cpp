#include "launch/job.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <ctime>
#include <fstream>
#include <set>

#include "accelerate/error.hpp"
#include "launch/log_files.hpp"

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

}  // namespace

Host Host::current() {
  Host host{.physical_cores = count_physical_cores(), .environment = {}};
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text(*entry);
    if (const size_t equals = text.find('='); equals != std::string_view::npos)
      host.environment.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
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
  Job job{.options = options};
  const auto& o = job.options;
  require(!o.command.empty() && !o.command.front().empty(),
          "no program was given. Name it after the options: accelerate launch [options] program [arguments]");
  require(!(o.module && o.no_python), "--module and --no_python contradict each other: a module is always run by Python. Leave one out");
  require(o.num_processes.value_or(1) >= 1,
          "--num_processes is " + std::to_string(o.num_processes.value_or(1)) + ", but at least 1 process is needed");
  require(o.num_machines >= 1, "--num_machines is " + std::to_string(o.num_machines) + ", but at least 1 machine is needed");
  require(std::set<std::string>{"no", "fp16", "bf16", "fp8"}.contains(o.mixed_precision),
          "--mixed_precision is '" + o.mixed_precision + "', expected no, fp16, bf16 or fp8");
  require(o.num_cpu_threads_per_process.value_or(1) >= 1, "--num_cpu_threads_per_process must be at least 1");
  require(o.gradient_accumulation_steps.value_or(1) >= 1, "--gradient_accumulation_steps must be at least 1");
  require(o.monitor_interval.count() >= 0 && o.grace.count() >= 0, "--monitor_interval and --grace_seconds can't be negative");
  const int64_t port = o.main_process_port.value_or(0);
  require(port >= 0 && port <= 65535, "--main_process_port is " + std::to_string(port) + ", expected 1 to 65535, or 0 for any free one");

  job.world_size = o.num_processes.value_or(1);
  job.machine_rank = o.machine_rank.value_or(0);
  if (o.num_machines > 1) {
    const std::string several = " must be given when --num_machines is more than 1 (it is " + std::to_string(o.num_machines) + ")";
    require(o.machine_rank.has_value(), "--machine_rank" + several + ": 0 on the main machine, then 1, 2, ... on the others");
    require(!o.main_process_ip.empty(), "--main_process_ip" + several + ": the address of machine 0 as the others reach it");
    require(port != 0, "--main_process_port" + several + ": a port that is free on machine 0, the same on all machines");
    require(job.world_size % o.num_machines == 0,
            "--num_processes counts the processes of all machines together: " + std::to_string(job.world_size) + " can't be shared equally by " +
                std::to_string(o.num_machines) + " machines. Use a multiple of " + std::to_string(o.num_machines));
  }
  require(job.machine_rank >= 0 && job.machine_rank < o.num_machines,
          "--machine_rank is " + std::to_string(job.machine_rank) + ", expected 0 to " + std::to_string(o.num_machines - 1) +
              " (--num_machines is " + std::to_string(o.num_machines) + ")");
  job.local_world_size = job.world_size / o.num_machines;
  parse_streams("--tee", o.tee, job.local_world_size);
  parse_streams("--redirects", o.redirects, job.local_world_size);
  if (!o.main_process_ip.empty()) job.main_ip = o.main_process_ip;
  job.main_port = port;
  job.run_id = new_run_id(job.machine_rank);

  // The reference's rule, with its quirk that the cores are shared out only when the number of processes was given as well.
  const int64_t inherited = host.number("OMP_NUM_THREADS").value_or(0);
  if (o.num_cpu_threads_per_process) {
    job.omp_threads = *o.num_cpu_threads_per_process;
  } else if (inherited > 0) {
    job.omp_threads = inherited;
  } else {
    job.omp_threads_chosen = true;
    int64_t ranks_here = job.local_world_size;
    for (const char* name : {"MV2_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"})
      if (const auto value = host.number(name); value.value_or(0) > 0) ranks_here = *value;
    if (o.cpu && o.num_processes) job.omp_threads = std::max<int64_t>(1, host.physical_cores / ranks_here);
  }
  return job;
}

}  // namespace accelerate::launcher
