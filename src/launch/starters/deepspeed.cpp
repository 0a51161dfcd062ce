#include "launch/starters/deepspeed.hpp"

#include <fmt/ranges.h>
#include <cerrno>
#include <cstring>

#include <fstream>

#include "launch/job/deepspeed_machines.hpp"
#include "launch/job/environment.hpp"
#include "launch/job/host.hpp"
#include "launch/job/job.hpp"
#include "launch/job/require.hpp"
#include "launch/job/settings.hpp"
#include "launch/starters/mpirun.hpp"
#include "launch/starters/remote.hpp"

namespace accelerate::launcher {
namespace {

std::string names_of(const std::vector<RemoteHost>& machines) {
  std::vector<std::string> names;
  for (const auto& machine : machines) names.push_back(machine.name);
  return fmt::format("{}", fmt::join(names, ","));
}

}  // namespace

std::vector<std::string> deepspeed_mpirun_words(const Job& job, const Host& host) {
  const std::string launcher = deepspeed_launcher(job.settings);
  const bool open_mpi = launcher == "openmpi";
  const std::string all = std::to_string(all_slots(job.remote)), each = std::to_string(job.remote.front().slots.size());
  const auto variables = build_environment(job, host, 0);
  std::vector<std::string> words{Mpirun::find(host, open_mpi).program};
  const auto add = [&](std::initializer_list<std::string> more) { words.insert(words.end(), more); };
  if (open_mpi)
    add({"-n", all, "-hostfile", job.settings.text("deepspeed_hostfile"), "--mca", "btl", "^openib", "--mca",
         "btl_tcp_if_include", "eth0", "--bind-to", "socket"});
  else
    // Names in place of DeepSpeed's file in /tmp, which several users would write.
    add({launcher == "mpich" ? "-n" : "-np", all, "-ppn", each, "-hosts", names_of(job.remote)});
  // Open MPI hands its variables to nobody on its own. Values stay out of command lines, which others can read.
  if (!open_mpi) return add({"-genvall"}), words;
  for (const auto& [name, value] : variables) add({"-x", name});
  for (const auto& [name, value] : host.environment)
    if (is_passed_on(name) && !variables.contains(name)) add({"-x", name});
  return words;
}

std::vector<std::string> deepspeed_srun_words(const Job& job, const Host& host) {
  const Settings& s = job.settings;
  const std::string srun = host.find_in_path("srun"), each = std::to_string(job.remote.front().slots.size());
  require(!srun.empty(),
          "--deepspeed_multinode_launcher slurm starts processes by srun, which is not in PATH. Install Slurm's client "
          "(Debian: slurm-client), or give another launcher");
  std::vector<std::string> words{srun,
                                 "-n",
                                 std::to_string(all_slots(job.remote)),
                                 "--nodes",
                                 std::to_string(job.remote.size()),
                                 "--ntasks-per-node",
                                 each,
                                 "--export=ALL"};
  const bool filtered = !s.text("deepspeed_inclusion_filter").empty() || !s.text("deepspeed_exclusion_filter").empty();
  if (filtered) words.insert(words.end(), {"--nodelist", names_of(job.remote)});
  else if (s.source("num_processes") > ValueSource::fallback && !s.computes_on_cpu())
    words.insert(words.end(), {"--gpus-per-node", each});
  return words;
}

std::vector<std::string> deepspeed_words(const Settings& settings, int64_t port) {
  const std::string launcher = settings.text("deepspeed_multinode_launcher");
  const std::string hostfile = settings.text("deepspeed_hostfile");
  require(
      !hostfile.empty(),
      "with DeepSpeed on several machines --deepspeed_hostfile must be given, a line for each: NAME slots=N. Or give "
      "--deepspeed_multinode_launcher standard and run this command on each");
  std::vector<std::string> words{"deepspeed", "--hostfile", hostfile};
  const auto add = [&](std::initializer_list<std::string> more) { words.insert(words.end(), more); };
  if (launcher == "nossh") add({"--node_rank", settings.text("machine_rank"), "--no_ssh"});
  else add({"--no_local_rank", "--launcher", launcher.empty() ? "pdsh" : launcher});
  if (const auto filter = settings.text("deepspeed_exclusion_filter"); !filter.empty()) add({"--exclude", filter});
  else if (const auto chosen = settings.text("deepspeed_inclusion_filter"); !chosen.empty()) add({"--include", chosen});
  else add({"--num_gpus", std::to_string(settings.num_processes() / settings.num_machines())});
  if (const auto ip = settings.text("main_process_ip"); !ip.empty()) add({"--master_addr", ip});
  add({"--master_port", std::to_string(port)});
  if (settings.on("module")) add({"--module"});
  if (settings.on("no_python")) add({"--no_python"});
  return words;
}

std::vector<std::string> add_to_deepspeed_env(const std::map<std::string, std::string>& variables, const Host& host) {
  const std::string file = host.variable("HOME").value_or(".") + "/.deepspeed_env";
  std::ofstream out(file, std::ios::app);
  std::vector<std::string> left_out;
  for (const auto& [name, value] : variables) {
    if (value.empty()) continue;
    if (value.find_first_of(";\n<> ") != std::string::npos) left_out.push_back(name);
    else out << name << '=' << value << '\n';
  }
  out.close();
  if (!out)
    raise<LaunchError>("{}, from which DeepSpeed takes the variables for other machines, can't be written: {}", file,
                       std::strerror(errno));
  return left_out;
}

}  // namespace accelerate::launcher
