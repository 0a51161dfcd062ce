#include "launch/starters/remote.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <set>
#include <sstream>

#include "launch/job/host.hpp"
#include "launch/job/job.hpp"
#include "launch/job/outcome.hpp"
#include "launch/job/require.hpp"
#include "launch/starters/shell_text.hpp"
#include "launch/supervise/log_files.hpp"
#include "launch/supervise/supervisor.hpp"
#include "launch/system/output.hpp"
#include "launch/system/process.hpp"
#include "launch/system/random_hex.hpp"

namespace accelerate::launcher {
namespace {

namespace fs = std::filesystem;

/// pdsh passes no standard input on, by which others send the token; it only keeps a stream open, which ends with it.
bool is_pdsh(const Job& job) { return fs::path(job.remote_shell).filename() == "pdsh"; }

/// --rdzv_conf without the token, which others of the machine could read on a command line. A file's name may be read
/// by them.
std::string without_token(const std::string& conf, bool keep_file) {
  std::vector<std::string> kept;
  std::istringstream entries(conf);
  for (std::string entry; std::getline(entries, entry, ',');)
    if (!entry.starts_with("token=") && (keep_file || !entry.starts_with("token_file="))) kept.push_back(entry);
  return fmt::format("{}", fmt::join(kept, ","));
}

/// Settings that say what this launcher does, or that each machine gets with a value of its own.
const std::set<std::string> kOursAlone{"hostfile",
                                       "include",
                                       "exclude",
                                       "remote_shell",
                                       "num_machines",
                                       "num_processes",
                                       "machine_rank",
                                       "main_process_ip",
                                       "main_process_port",
                                       "rdzv_conf",
                                       "processes_per_machine",
                                       "config_file",
                                       "monitor",
                                       "monitor_port",
                                       "monitor_host",
                                       "monitor_seconds",
                                       "monitor_peak_flops",
                                       "deepspeed_hostfile",
                                       "deepspeed_inclusion_filter",
                                       "deepspeed_exclusion_filter",
                                       "deepspeed_multinode_launcher"};

/// The port on the first machine of a hostfile where all of them meet.
int64_t meeting_port(const Job& job) { return job.main_port ? job.main_port : 29500; }

/// The report on the end, in the words of machines.
std::string report_machines(const Job& job, const LogFiles&, const Outcome& outcome) {
  if (job.quiet() && !outcome.first_failure) return "";
  if (outcome.stop_signal)
    return fmt::format("accelerate launch: stopped by {}; all machines have been told.\n",
                       signal_name(outcome.stop_signal));
  if (!outcome.first_failure) return "";
  const RankRecord& record = outcome.ranks[*outcome.first_failure];
  return fmt::format(
      "accelerate launch: on {} the launcher {}{}\n", job.remote[static_cast<size_t>(record.rank)].name,
      describe(*record.end),
      record.end->exit_code == 255 ? ". 255 is what ssh itself returns: can you log in there without a password?" : "");
}

}  // namespace

bool is_passed_on(const std::string& name) {
  for (const char* prefix : {"NCCL_", "GLOO_", "UCX_", "MV2_", "MLFLOW", "TORCH_", "PYTHON", "OMP_", "MKL_", "HF_",
                             "CUDA_HOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "ACCELERATE_"})
    if (name.starts_with(prefix)) return name != "ACCELERATE_LAUNCH_TETHER";
  return false;
}

std::vector<std::string> remote_command(const Job& job, const Host& host, size_t rank) {
  const Settings& s = job.settings;
  const RemoteHost& machine = job.remote[rank];
  std::error_code ignored;
  const fs::path folder = fs::current_path(ignored), program = fs::read_symlink("/proc/self/exe", ignored);
  const bool pdsh = is_pdsh(job);
  std::string line = "cd " + quoted(folder) + " && exec env ACCELERATE_LAUNCH_TETHER=" + (pdsh ? "end" : "token");
  for (const auto& [name, value] : job.exported) line += " " + quoted(name + "=" + value);
  for (const auto& [name, value] : host.environment)
    if (is_passed_on(name) && !job.exported.contains(name)) line += " " + quoted(name + "=" + value);
  line += " " + quoted(program) + " launch";
  const auto add = [&](const std::string& flag, const std::string& value) { line += " " + flag + " " + quoted(value); };
  for (const auto& group : config::launch_table().groups)
    for (const auto& option : group.options) {
      const std::string name = option.name;
      if (option.positional() || option.kind == config::Kind::unset || s.source(name) != ValueSource::flag ||
          kOursAlone.contains(name) || (name == "gpu_ids" && machine.chosen_slots))
        continue;
      if (option.kind == config::Kind::flag) line += s.on(name) ? " --" + name : "";
      else if (option.kind == config::Kind::append)
        for (const auto& value : s[name]) add("--" + name, config::python_text(value));
      else add("--" + name, s.text(name));
    }
  if (!job.config_file.empty()) add("--config_file", fs::absolute(job.config_file));
  if (const auto conf = without_token(s.text("rdzv_conf"), pdsh); !conf.empty()) add("--rdzv_conf", conf);
  add("--num_machines", std::to_string(job.remote.size()));
  add("--machine_rank", std::to_string(rank));
  add("--num_processes", std::to_string(all_slots(job.remote)));
  add("--processes_per_machine", std::to_string(machine.slots.size()));
  if (job.remote.size() > 1)
    add("--main_process_ip", s.text("main_process_ip").empty() ? job.remote.front().name : s.text("main_process_ip"));
  if (job.remote.size() > 1 || job.main_port) add("--main_process_port", std::to_string(meeting_port(job)));
  if (machine.chosen_slots) add("--gpu_ids", fmt::format("{}", fmt::join(machine.slots, ",")));
  // There nobody starts others, whatever a config file says.
  if (job.remote.size() > 1 && s.launcher() == Launcher::deepspeed) add("--deepspeed_multinode_launcher", "standard");
  for (const auto& word : job.command) line += " " + quoted(word);
  const std::string shell = host.find_in_path(job.remote_shell);
  if (!pdsh) return {shell, machine.name, line};
  for (size_t i = 0; (i = line.find('%', i)) != std::string::npos; i += 2) line.insert(i, "%");  // it would replace %h
  // One pdsh for each machine: -S makes it return what the launcher there returns, -N leaves lines as they are, -b lets
  // the first signal end it.
  std::vector<std::string> words{shell, "-S", "-N", "-b", "-w", machine.name, line};
  if (!host.environment.contains("PDSH_RCMD_TYPE")) words.insert(words.begin() + 1, {"-R", "ssh"});
  return words;
}

int launch_by_hostfile(Job job, const Host& host, Monitor* monitor) {
  const Settings& settings = job.settings;
  require(!host.find_in_path(job.remote_shell).empty(),
          "machines of a hostfile are reached by '{}' (--remote_shell), which is not in PATH. Install it (Debian: {}), "
          "or start this command on each machine with --machine_rank",
          job.remote_shell, is_pdsh(job) ? "pdsh" : "openssh-client");
  std::string first_input;
  if (is_pdsh(job)) {
    const std::string conf = "," + settings.text("rdzv_conf");
    require(conf.find(",token=") == std::string::npos,
            "pdsh passes no standard input on, so it can't carry the token of --rdzv_conf, and a command line could be "
            "read by others. Write it to a file on each machine and name that with token_file=, or leave out "
            "--remote_shell pdsh");
    if (conf.find(",token_file=") == std::string::npos && job.remote.size() > 1 && !job.quiet())
      say_on_stderr(fmt::format(
          "the machines meet without a token, which pdsh can't carry: whoever reaches port {} of {} could take part. "
          "--rdzv_conf token_file=FILE names a secret that lies on each machine",
          meeting_port(job), job.remote.front().name));
  } else {
    first_input = (job.rendezvous.token.empty() ? random_hex(32) : job.rendezvous.token) + "\n";
  }
  // Launchers whose machines fail together say so themselves.
  job.monitor_interval = std::max<std::chrono::milliseconds>(job.monitor_interval, std::chrono::seconds(3));
  job.grace += std::chrono::seconds(2);
  std::vector<std::vector<std::string>> commands;
  for (size_t i = 0; i < job.remote.size(); ++i) commands.push_back(remote_command(job, host, i));
  const LogFiles logs(job);
  return supervise({.job = job,
                    .host = host,
                    .logs = logs,
                    .commands = commands,
                    .first_input = first_input,
                    .say = report_machines,
                    .monitor = monitor})
      .exit_code();
}

std::string take_tether(bool with_token) {
  std::string line;
  if (with_token) {
    char c = 0;
    while (::read(STDIN_FILENO, &c, 1) == 1 && c != '\n') line += c;
    if (c != '\n')
      raise<LaunchError>(
          "ACCELERATE_LAUNCH_TETHER is set, which is how a launcher starts another by --hostfile, but nothing came "
          "through the standard input");
  }
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) raise_no_process();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::prctl(PR_SET_NAME, "accelerate-teth");
    if (::getppid() != parent) ::_exit(0);
    ::setpgid(0, 0);
    ::close_range(1, ~0U, 0);  // or the shell's connection would stay open for it
    char bytes[256];
    while (::read(STDIN_FILENO, bytes, sizeof(bytes)) > 0) {
    }
    ::kill(parent, SIGTERM);
    ::_exit(0);
  }
  if (const int nothing = ::open("/dev/null", O_RDONLY); nothing >= 0) ::dup2(nothing, STDIN_FILENO), ::close(nothing);
  ::unsetenv("ACCELERATE_LAUNCH_TETHER");
  return line;
}

}  // namespace accelerate::launcher
