#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// A job that `accelerate launch` is asked to start.
///
/// `command` is what runs; all else are settings. Any setting can be given in `settings` by its name, with the text
/// that would follow the flag. The fields are the common ones with their C++ types, each short for the entry of its
/// name. A setting that is given, even as its default, stands above environment variables, and those above the config
/// file; one that is not given has the default of docs/settings.md.
struct LaunchOptions {
  /// The program and its arguments. A path, a file in the current folder, or else a name looked up in PATH. A `.py`
  /// file is run by Python ($PYTHON, else the active virtual environment's, else python3), anything else directly: it
  /// must be executable.
  std::vector<std::string> command;
  std::optional<bool> module;     ///< command[0] is a Python module: `python -m command...`
  std::optional<bool> no_python;  ///< run command[0] directly even if it is called *.py; not together with `module`

  /// Ranks over all machines together, a multiple of num_machines. Unset: one per GPU of this machine, else 1.
  std::optional<int64_t> num_processes;
  /// Machines that take part (1 when unset); `accelerate launch` is run once on each, and they meet through
  /// accelerate-agent (docs/multi_node.md). Fewer may do with {"num_machines", "MIN:MAX"} in `settings`.
  std::optional<int64_t> num_machines;
  /// 0 to num_machines - 1; required when there are several, unless {"rdzv_backend", "c10d"} is in `settings`.
  std::optional<int64_t> machine_rank;
  /// Address of machine 0; empty: 127.0.0.1. Required when there are several machines.
  std::string main_process_ip;
  /// TCP port on machine 0 at which the ranks meet (rank 0 opens it, the launcher does not) or, with several machines,
  /// the agents. 0 or unset: a free one is chosen. Required, and the same everywhere, when there are several machines.
  std::optional<int64_t> main_process_port;

  std::optional<bool> cpu;      ///< ranks compute on the CPU even where an accelerator is present
  std::string mixed_precision;  ///< no (also when empty), fp16, bf16 or fp8
  std::optional<int64_t> gradient_accumulation_steps;  ///< given to the ranks, which `Accelerator` reads as its default
  /// OMP_NUM_THREADS of each rank. Unset: as in the environment; else, with `cpu`, the machine's cores divided by its
  /// ranks; else 1.
  std::optional<int64_t> num_cpu_threads_per_process;
  std::optional<bool> debug;  ///< ranks compare shapes before each collective (slower, but no hang on a mismatch)

  std::optional<bool> quiet;      ///< the launcher itself prints one line at most, and only when a rank failed
  std::filesystem::path log_dir;  ///< log files go to log_dir/<run id>/attempt_<n>/<local rank>/{stdout,stderr}.log
  /// Streams written to log files *instead of* the terminal: 0 none, 1 stdout, 2 stderr, 3 both, or "0:1,1:3" by local
  /// rank.
  std::optional<std::string> redirects;
  /// Streams written to log files *and*, each line after "[rank0]:", to the terminal; same syntax.
  std::optional<std::string> tee;

  std::optional<int64_t> max_restarts;  ///< after a failure all ranks are stopped and started again, up to this often
  std::optional<std::string> role;      ///< the ranks' ROLE_NAME
  /// How long, once a rank has failed, the others may end by themselves before they are stopped, so that those that
  /// fail for the same reason can say so. The end of a rank is seen at once, whatever this is.
  std::optional<std::chrono::milliseconds> monitor_interval;
  /// How long ranks that were asked to stop (SIGTERM, Ctrl-C) may take before SIGKILL; --grace_seconds.
  std::optional<std::chrono::milliseconds> grace;

  /// Any setting by its name, with the text that would follow the flag ("true" for one without a value):
  /// {{"use_fsdp", "true"}, {"fsdp_version", "2"}}. docs/settings.md lists them. Of two for one setting the last
  /// counts, and these count after the fields.
  std::vector<std::pair<std::string, std::string>> settings;
  /// YAML (or, by its name, JSON) file of `accelerate config` or of Hugging Face Accelerate; empty: none is read.
  std::filesystem::path config_file;
  std::optional<bool> dry_run;  ///< print what would be started, and with which variables, and start nothing
};

/// Starts this machine's ranks, forwards their output, and returns when all of them and whatever they left in their
/// process groups have ended.
///
/// Blocking. With one rank on this machine the rank has the terminal to itself (so progress bars and colours work);
/// with several, their lines are forwarded whole and the first alone keeps standard input and the terminal.
/// When a rank fails, the others get SIGTERM, then after `grace` SIGKILL, and a report on stderr names the one that
/// failed first. SIGINT, SIGTERM and SIGHUP go to all ranks, with the same grace; a second SIGINT kills at once;
/// SIGUSR1 is passed on, and so is SIGUSR2, to processes that have a handler for it: ranks that use the library say
/// what they do (docs/logging.md). Ranks die with the launcher, even if that is killed by SIGKILL.
///
/// Call it from a thread of a program that does not wait for "any" child meanwhile and leaves SIGCHLD alone; signal
/// settings are restored.
/// @return 0 if every rank returned 0; else the exit code of the rank that failed first (128 + signal if a signal ended
///         it); 128 + signal when a signal to the launcher ended the job. With several machines the failure may be on
///         another one; 69: a machine was lost; 71: they did not meet.
/// @throws ConfigError  options that contradict each other, are out of range or name no program; nothing was started.
/// @throws LaunchError  a busy port, a program that can't be executed; what was started has been killed.
ACCELERATE_API int launch(const LaunchOptions& options);

/// Processes for a function of this program; the reference's notebook_launcher.
struct FunctionLaunchOptions {
  int64_t num_processes = 2;           ///< on this machine
  std::string mixed_precision = "no";  ///< no, fp16, bf16 or fp8
  bool cpu = false;                    ///< compute on the CPU even where an accelerator is present
  int64_t num_nodes = 1;  ///< machines; each calls this with its own node_rank and otherwise the same options
  int64_t node_rank = 0;
  std::string master_addr = "127.0.0.1";
  /// The port on machine 0 where processes meet; unset on a single machine: a free one.
  std::optional<int64_t> use_port;
  /// After a failure all processes of this machine are started again, up to this often; TORCHELASTIC_RESTART_COUNT
  /// counts. With several machines the failure is one for the other machines' processes too, as soon as they need a
  /// peer that is gone: give all the same number.
  int64_t max_restarts = 0;
  /// "host" or "host:port", short for master_addr and use_port.
  std::string rdzv_endpoint;
  std::string rdzv_id = "none";  ///< the processes' TORCHELASTIC_RUN_ID
  /// How long, once a process has failed, the others may fail by themselves before they are killed.
  std::chrono::milliseconds monitor_interval{100};

  // Refused, with what to do instead, where they are anything else than this:

  std::string rdzv_backend = "static";           ///< machines have no agents here that agree on their ranks
  std::map<std::string, std::string> rdzv_conf;  ///< settings of such agents
  std::string log_line_prefix_template;          ///< the processes write to the standard streams themselves
};

/// Calls `function` in several processes, which are copies of this one: they see everything that it captured, and their
/// changes are their own.
///
/// Blocking; standard streams are shared. Call it before LibTorch has computed anything and before there are other
/// threads, which a copied process would not have. When a process fails, by an exception or otherwise, the others are
/// killed after `monitor_interval`, or after 3 s where it only reports that a peer is gone. Other children of this
/// process are left to it.
/// @throws ConfigError  options that can't be, or other threads are running already.
/// @throws LaunchError  naming the rank whose failure is the likeliest cause of the others', by the rule of launch(),
/// with the text of its exception, once there are no restarts left.
ACCELERATE_API void launch_function(const std::function<void()>& function, const FunctionLaunchOptions& options = {});

/// The reference's names: processes for a cell of a notebook, and CPU processes for a test.
inline void notebook_launcher(const std::function<void()>& function, const FunctionLaunchOptions& options = {}) {
  launch_function(function, options);
}
inline void debug_launcher(const std::function<void()>& function, int64_t num_processes = 2) {
  launch_function(function, {.num_processes = num_processes, .cpu = true});
}

/// Sets environment variables for as long as it lives, and puts back what was there. Not while other threads read the
/// environment.
class ACCELERATE_API PatchedEnvironment {
 public:
  explicit PatchedEnvironment(const std::map<std::string, std::string>& variables);
  ~PatchedEnvironment();
  PatchedEnvironment(const PatchedEnvironment&) = delete;
  PatchedEnvironment& operator=(const PatchedEnvironment&) = delete;

 private:
  std::vector<std::pair<std::string, std::optional<std::string>>> before_;
};
[[nodiscard]] inline PatchedEnvironment patch_environment(const std::map<std::string, std::string>& variables) {
  return PatchedEnvironment(variables);
}

/// Binds this process, and the threads that it starts from now on, to a rank's share of the cores: those of its GPU's
/// node where there are GPUs.
ACCELERATE_API void set_numa_affinity(int64_t local_rank, int64_t local_world_size);

}  // namespace accelerate
