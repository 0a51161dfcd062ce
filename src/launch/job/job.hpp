#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/job/hostfile.hpp"
#include "launch/job/rendezvous.hpp"
#include "launch/job/settings.hpp"

namespace accelerate::launcher {

/// The job: the settings, checked against each other and with every "unset" decided.
///
/// The value of one setting is read from `settings`; members of this class follow from several settings or from the
/// machine.
struct Job {
  std::vector<std::string> command;   ///< the program and its arguments
  std::filesystem::path config_file;  ///< that was read, or empty
  Settings settings;

  int64_t world_size = 1;
  int64_t local_world_size = 1;
  int64_t num_machines = 1;
  int64_t min_machines = 1;  ///< less than num_machines: the job goes on with so few
  int64_t machine_rank = 0;
  std::string main_ip = "127.0.0.1";
  int64_t main_port = 0;             ///< 0 until launch() has chosen one
  RendezvousConf rendezvous;         ///< how several machines meet
  std::optional<Round> round;        ///< with several machines: this one's place, once they have met
  std::optional<LaunchPlace> place;  ///< of the one process that is started, in another launcher's job

  /// The program that starts the ranks: this launcher, or one process of another program that it starts instead of
  /// them.
  enum class Starter { launcher, mpirun, srun, deepspeed, hostfile, xla, pod } starter = Starter::launcher;
  std::filesystem::path xla_starter = "accelerate_xla.py";  ///< with xla: the file that Python runs, once it is written
  /// The machines of --hostfile, each with a launcher in the place of a rank, or of --deepspeed_hostfile, whoever
  /// starts their ranks.
  std::vector<RemoteHost> remote;
  std::string remote_shell = "ssh";             ///< with hostfile: who starts the launchers
  std::map<std::string, std::string> exported;  ///< of .deepspeed_env, for the ranks of all machines
  std::optional<int64_t> first_rank;            ///< of this machine, where a hostfile says it
  std::vector<int64_t> devices;  ///< the slots that DeepSpeed's hostfile leaves this machine; empty: it has no say
  std::vector<std::string> pod_workers;  ///< with pod: those to be reached one by one; empty: all by one command

  std::chrono::milliseconds monitor_interval{100};  ///< after a failure, for the others to end by themselves
  std::chrono::milliseconds grace{30000};           ///< from asking ranks to stop to killing them
  /// The file in which the main process leaves its receipts; empty: nobody asked for them.
  std::filesystem::path receipts_file;
  int64_t max_restarts = 0;
  int64_t attempt = 0;               ///< how often the ranks have been started before
  std::vector<std::string> remarks;  ///< beside those of the settings: what has no effect, a line each
  std::string run_id;                ///< names the log folder; also TORCHELASTIC_RUN_ID

  bool quiet() const { return settings.on("quiet"); }
  bool distributed() const { return world_size > 1 || round; }
  /// Whether processes are told of their ranks, as torchrun does also of a single one: Python's FSDP and DeepSpeed look
  /// for that.
  bool tells_ranks() const {
    const auto launcher = settings.launcher();
    return distributed() ||
           (starter == Starter::launcher && (launcher == Launcher::torchrun || launcher == Launcher::deepspeed));
  }
  /// Machines that must meet before their ranks start.
  bool needs_agent() const { return num_machines > 1 && starter == Starter::launcher; }
  bool needs_port() const {
    return starter != Starter::xla && starter != Starter::pod && !place &&
           (tells_ranks() || starter != Starter::launcher);
  }
  /// Whether what this launcher starts are the ranks, or another program that will start them here; else they are
  /// launchers on other machines.
  bool starts_ranks() const { return starter != Starter::hostfile && starter != Starter::pod; }
  /// A launcher on each machine of `remote` takes the place of a rank.
  void start_launchers() {
    starter = Starter::hostfile;
    num_machines = min_machines = 1;
    machine_rank = 0;
    world_size = local_world_size = static_cast<int64_t>(remote.size());
  }
  int64_t rank(int64_t local_rank) const {
    return (round        ? round->first_rank
            : place      ? place->rank
            : first_rank ? *first_rank
                         : machine_rank * local_world_size) +
           local_rank;
  }
};

/// @throws ConfigError naming the option at fault.
Job make_job(const LaunchRequest& request, const Host& host);

}  // namespace accelerate::launcher
