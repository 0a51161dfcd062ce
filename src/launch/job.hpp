#pragma once

#include <map>
#include <string>

#include "accelerate/launch.hpp"
#include "launch/hostfile.hpp"
#include "launch/rendezvous.hpp"
#include "launch/settings.hpp"

namespace accelerate::launcher {

/// What the launcher needs to know about the machine that it runs on; a value, so that tests can invent one.
struct Host {
  int64_t physical_cores = 1;  ///< hyper-threads counted once, limited to those that this process may use
  std::map<std::string, std::string> environment;  ///< the caller's
  int64_t accelerators = 0;                        ///< GPUs that this process may use
  static Host current();

  /// The variable as a number; nothing if it is unset or not one.
  std::optional<int64_t> number(const std::string& name) const;
};

/// Checked options with every "unset" decided: what runs where.
struct Job {
  LaunchOptions options;  ///< with the values that won (see Settings)
  Settings settings;
  int64_t world_size = 1;
  int64_t local_world_size = 1;
  int64_t num_machines = 1;
  int64_t min_machines = 1;  ///< less than num_machines: the job goes on with so few
  int64_t machine_rank = 0;
  std::string main_ip = "127.0.0.1";
  int64_t main_port = 0;       ///< 0 until launch() has chosen one
  RendezvousConf rendezvous;   ///< how several machines meet
  std::optional<Round> round;  ///< with several machines: this one's place, once they have met
  /// Who starts the ranks: this launcher, or one process of another program that it starts instead of them.
  enum class Starter { launcher, mpirun, deepspeed, hostfile, xla, pod } starter = Starter::launcher;
  std::vector<RemoteHost>
      remote;  ///< with Starter::hostfile: the machines, on each of which a launcher takes the place of a rank
  std::string remote_input;  ///< what each of them reads first; empty where the shell passes no input on
  std::vector<std::vector<std::string>> commands;  ///< with Starter::pod: what is run in the places of ranks
  std::filesystem::path xla_starter;               ///< with Starter::xla: the file that Python runs (see tpu.hpp)
  int64_t attempt = 0;                             ///< how often the ranks have been started before
  std::string run_id;                              ///< names the log folder; also TORCHELASTIC_RUN_ID

  bool distributed() const { return world_size > 1 || round; }
  /// Machines that must meet before their ranks start.
  bool needs_agent() const { return num_machines > 1 && starter == Starter::launcher; }
  bool needs_port() const {
    return starter != Starter::xla && starter != Starter::pod && (distributed() || starter != Starter::launcher);
  }
  /// Whether what this launcher starts are the ranks, or another program that will start them here; else they are
  /// launchers on other machines.
  bool starts_ranks() const { return starter != Starter::hostfile && starter != Starter::pod; }
  int64_t rank(int64_t local_rank) const {
    return (round ? round->first_rank : machine_rank * local_world_size) + local_rank;
  }
};

/// @throws ConfigError naming the option at fault.
Job make_job(const LaunchOptions& options, const Host& host);

}  // namespace accelerate::launcher
