#include "launch/job/deepspeed_machines.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <utility>

#include "accelerate/config.hpp"
#include "input/read_file.hpp"
#include "launch/job/environment.hpp"
#include "launch/job/host.hpp"
#include "launch/job/job.hpp"
#include "launch/job/option_values.hpp"
#include "launch/job/require.hpp"

namespace accelerate::launcher {
namespace {

const std::vector<std::string> kDeepSpeedLaunchers{"pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"};

/// Variables for the other machines, from the files that DeepSpeed reads. The job's own variables are stronger: there
/// the reference writes it behind all else.
void take_deepspeed_env(Job& job, const Host& host) {
  const std::string name = host.variable("DS_ENV_FILE").value_or(".deepspeed_env");
  for (const std::filesystem::path& folder : {std::filesystem::path(host.variable("HOME").value_or("/")), {"."}}) {
    const auto file = folder / name;
    if (!is_there(file)) continue;
    std::string text;
    const auto problem = read_file(file, kMostSettingsBytes, text);
    require(problem.empty(), "{}, which has variables for the other machines, can't be read: {}", file.string(),
            problem);
    for (const auto& [variable, value] : parse_deepspeed_env(text, file.string())) job.exported[variable] = value;
  }
  for (const auto& [own, value] : protocol(job.settings, host)) job.exported.erase(own);
  for (const char* own : {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
    job.exported.erase(own);
  for (const auto& [variable, value] : job.exported)
    if (value.find('$') != std::string::npos)
      job.remarks.push_back(
          fmt::format("{} of {} is passed on as it stands: no shell replaces what is behind its $", variable, name));
}

/// Variables that DeepSpeed adds for programs that call MPI themselves, unless somebody says otherwise.
void add_variables_of_mpi(Job& job, const Host& host, const std::string& launcher) {
  const auto add = [&](const char* name, const char* value) {
    if (!host.environment.contains(name)) job.exported.emplace(name, value);
  };
  if (launcher == "openmpi") add("UCX_TLS", "tcp");
  if (launcher != "mvapich") return;
  for (const auto& [name, value] : {std::pair("MV2_SMP_USE_CMA", "0"),
                                    {"MV2_DEBUG_SHOW_BACKTRACE", "1"},
                                    {"MV2_SUPPORT_DL", "1"},
                                    {"MV2_ENABLE_AFFINITY", "0"},
                                    {"MV2_INTER_ALLGATHER_TUNING", "5"},
                                    {"MV2_CUDA_USE_NAIVE", "0"}})
    add(name, value);
  if (!job.settings.computes_on_cpu() && host.accelerators > 0 && host.device_type == std::string_view("cuda"))
    add("MV2_USE_CUDA", "1");
}

/// The machines with the slots that are used of each. Without a filter a number of processes says how many, the first
/// ones.
std::vector<RemoteHost> deepspeed_machines(const Settings& s, bool by_mpi) {
  const std::string file = s.text("deepspeed_hostfile"), include = s.text("deepspeed_inclusion_filter"),
                    exclude = s.text("deepspeed_exclusion_filter"), launcher = deepspeed_launcher(s);
  require(!by_mpi || (include.empty() && exclude.empty()),
          "--deepspeed_multinode_launcher {} starts all slots of the hostfile: leave out --deepspeed_inclusion_filter "
          "and --deepspeed_exclusion_filter, or give pdsh or nossh",
          launcher);
  const FilterFlags flags{"--deepspeed_inclusion_filter", "--deepspeed_exclusion_filter"};
  auto machines = filter_hosts(read_hostfile("--deepspeed_hostfile", file), include, exclude, flags);
  if (s.source("num_processes") == ValueSource::fallback || s.num_processes() < 1) return machines;
  if (by_mpi)
    require(s.num_processes() == all_slots(machines),
            "--num_processes is {}, and --deepspeed_multinode_launcher {} starts a process for each slot of the "
            "hostfile, which has {}. Correct one of them, or leave out --num_processes",
            s.num_processes(), launcher, all_slots(machines));
  if (by_mpi || !include.empty() || !exclude.empty()) return machines;
  require(s.num_processes() % s.num_machines() == 0,
          "--num_processes counts the processes of all machines together: {} can't be shared equally by {} machines. "
          "Use a multiple of {}, or leave it out: then each slot of the hostfile has one",
          s.num_processes(), s.num_machines(), s.num_machines());
  const auto each = static_cast<size_t>(s.num_processes() / s.num_machines());
  for (auto& machine : machines) {
    require(machine.slots.size() >= each,
            "--num_processes {} on --num_machines {} asks for {} slots on each machine, and in the hostfile {} {} has "
            "{}. Correct one of them, or leave out --num_processes: then each slot has a process",
            s.num_processes(), s.num_machines(), each, file, machine.name, machine.slots.size());
    machine.slots.resize(each);
  }
  return machines;
}

/// srun and most kinds of mpirun start one number of processes on each machine.
void check_equal_slots(const std::vector<RemoteHost>& machines, const std::string& launcher) {
  const RemoteHost& first = machines.front();
  for (const auto& machine : machines)
    require(machine.slots.size() == first.slots.size(),
            "--deepspeed_multinode_launcher {} needs as many slots on each machine, found {} on {} and {} on {}. pdsh "
            "and openmpi take any",
            launcher, first.slots.size(), first.name, machine.slots.size(), machine.name);
}

/// srun knows nothing of devices by their numbers.
void check_first_slots(const std::vector<RemoteHost>& machines) {
  for (const auto& machine : machines)
    require(machine.slots.back() + 1 == static_cast<int64_t>(machine.slots.size()),
            "--deepspeed_multinode_launcher slurm can't choose slots by their numbers, found {} on {}: choose whole "
            "machines, or the first slots of each",
            fmt::join(machine.slots, ","), machine.name);
}

void remark_on_deepspeed_machines(Job& job, const std::string& launcher) {
  const Settings& s = job.settings;
  const auto machines = static_cast<int64_t>(job.remote.size()), processes = all_slots(job.remote);
  const bool other_number = s.source("num_processes") > ValueSource::fallback && s.num_processes() != processes;
  if (machines != s.num_machines() || other_number)
    job.remarks.push_back(
        fmt::format("the hostfile and what is asked of it leave {} processes on {} machines, which count: "
                    "--num_machines is {}{}",
                    processes, machines, s.num_machines(),
                    other_number ? fmt::format(", --num_processes {}", s.num_processes()) : ""));
  const auto has_no_effect = [&](const char* name, const std::string& why) {
    if (s.source(name) == ValueSource::flag)
      job.remarks.push_back(
          fmt::format("--{} has no effect with --deepspeed_multinode_launcher {}: {}", name, launcher, why));
  };
  if (launcher == "pdsh" || launcher == "nossh") has_no_effect("gpu_ids", "the hostfile's slots are the devices");
  else has_no_effect("rdzv_conf", "it starts the ranks themselves, and no launchers that meet");
  has_no_effect("processes_per_machine", "the hostfile has the number for each");
  if (launcher != "pdsh") has_no_effect("remote_shell", "it reaches the machines by itself");
  if (launcher == "slurm" && s.text("deepspeed_inclusion_filter").empty() &&
      s.text("deepspeed_exclusion_filter").empty())
    job.remarks.emplace_back(
        "Slurm chooses the machines: of the hostfile only their number counts, and the names once there is a filter");
}

}  // namespace

std::string deepspeed_launcher(const Settings& settings) {
  const std::string name = in_small_letters(settings.text("deepspeed_multinode_launcher"));
  return name.empty() ? "pdsh" : name;
}

bool deepspeed_starts_machines(const Settings& settings) {
  return settings.launcher() == Launcher::deepspeed && settings.num_machines() > 1 &&
         settings.text("hostfile").empty() && deepspeed_launcher(settings) != "standard";
}

void plan_deepspeed_machines(Job& job, const Host& host) {
  const Settings& s = job.settings;
  const std::string launcher = deepspeed_launcher(s);
  if (std::find(kDeepSpeedLaunchers.begin(), kDeepSpeedLaunchers.end(), launcher) == kDeepSpeedLaunchers.end()) {
    const auto nearest = nearest_name(launcher, kDeepSpeedLaunchers);
    raise<ConfigError>("--deepspeed_multinode_launcher is '{}', expected one of {}{}", launcher,
                       fmt::join(kDeepSpeedLaunchers, ", "),
                       nearest ? fmt::format(". Did you mean '{}'?", *nearest) : "");
  }
  require(!s.text("deepspeed_hostfile").empty(),
          "with DeepSpeed on several machines --deepspeed_hostfile must be given, a line for each: NAME slots=N. Or "
          "give --deepspeed_multinode_launcher standard and run this command on each");
  require(s.text("rdzv_backend") == "static" && job.min_machines == job.num_machines,
          "--deepspeed_hostfile names a fixed set of machines: leave out --rdzv_backend c10d and MIN:MAX, or give "
          "--deepspeed_multinode_launcher standard");
  require(job.main_port != 0,
          "--main_process_port is 0, expected a port that is free on the first machine (29500 without it)");
  const bool mpi = launcher == "openmpi" || launcher == "mpich" || launcher == "mvapich";
  job.remote = deepspeed_machines(s, mpi);
  if (launcher == "slurm") check_first_slots(job.remote);
  if (launcher == "slurm" || (mpi && launcher != "openmpi")) check_equal_slots(job.remote, launcher);
  const std::string ip = s.text("main_process_ip");
  job.main_ip = !ip.empty() ? ip : launcher == "slurm" ? "" : job.remote.front().name;
  remark_on_deepspeed_machines(job, launcher);

  const auto machines = static_cast<int64_t>(job.remote.size());
  const auto given = job.rendezvous.rank ? job.rendezvous.rank : s.integer("machine_rank");
  const int64_t rank = given.value_or(0);
  if (launcher == "nossh") {
    require(given && rank >= 0 && rank < machines,
            "--machine_rank is {}, expected this machine's place among those that the hostfile leaves: 0 to {}",
            given ? std::to_string(rank) : "not given", machines - 1);
    job.num_machines = job.min_machines = machines;
    job.machine_rank = rank;
    job.devices = job.remote[static_cast<size_t>(rank)].slots;
    job.first_rank = all_slots({job.remote.begin(), job.remote.begin() + rank});
    job.world_size = all_slots(job.remote);
    job.local_world_size = static_cast<int64_t>(job.devices.size());
    job.remote.clear();
    return;
  }
  require(rank == 0,
          "--machine_rank is {}, and --deepspeed_multinode_launcher {} starts all machines from one: run this command "
          "there alone, or give nossh or standard",
          rank, launcher);
  take_deepspeed_env(job, host);
  // Each rank sees what its machine's slots say, as with DeepSpeed also where nobody chose some of them.
  for (auto& machine : job.remote) machine.chosen_slots = true;
  job.machine_rank = 0;
  if (launcher == "pdsh") {
    job.remote_shell = s.source("remote_shell") > ValueSource::fallback ? s.text("remote_shell") : "pdsh";
    job.start_launchers();
    return;
  }
  add_variables_of_mpi(job, host, launcher);
  job.starter = mpi ? Job::Starter::mpirun : Job::Starter::srun;
  job.world_size = job.local_world_size = job.num_machines = job.min_machines = 1;
}

}  // namespace accelerate::launcher
