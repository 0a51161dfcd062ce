#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>

#include "accelerate/config/option.hpp"
#include "accelerate/launch.hpp"
#include "config/value.hpp"
#include "launch/job/require.hpp"
#include "launch/system/affinity.hpp"
#include "launch/system/ports.hpp"
#include "launch/system/process.hpp"

namespace accelerate {
namespace {

using namespace launcher;

struct Failure {
  int64_t rank = 0;
  std::string what;
};

void check(const FunctionLaunchOptions& o) {
  require(o.num_processes >= 1, "launch_function: num_processes is {}, but at least 1 process is needed",
          o.num_processes);
  require(o.num_nodes >= 1 && o.node_rank >= 0 && o.node_rank < o.num_nodes,
          "launch_function: node_rank is {}, expected 0 to num_nodes - 1 (num_nodes is {})", o.node_rank, o.num_nodes);
  require(o.num_nodes == 1 || (o.use_port && o.master_addr != "127.0.0.1"),
          "launch_function: several machines need master_addr and use_port, the same on all of them");
  require(o.max_restarts >= 0, "launch_function: max_restarts can't be negative");
  config::parse_value(*config::launch_table().find("mixed_precision"), o.mixed_precision, "mixed_precision");
  std::error_code ignored;
  const auto threads = std::distance(std::filesystem::directory_iterator("/proc/self/task", ignored),
                                     std::filesystem::directory_iterator());
  require(
      threads <= 1,
      "launch_function: this process has {} threads already, which copies of it would lack. Call it before LibTorch "
      "computes anything, or start the program with `accelerate launch`",
      threads);
}

std::map<std::string, std::string> environment(const FunctionLaunchOptions& o, int64_t local_rank, int64_t port,
                                               int64_t attempt) {
  const int64_t rank = o.node_rank * o.num_processes + local_rank;
  return {{"RANK", std::to_string(rank)},
          {"LOCAL_RANK", std::to_string(local_rank)},
          {"WORLD_SIZE", std::to_string(o.num_processes * o.num_nodes)},
          {"LOCAL_WORLD_SIZE", std::to_string(o.num_processes)},
          {"MASTER_ADDR", o.master_addr},
          {"MASTER_PORT", std::to_string(port)},
          {"NPROC", std::to_string(o.num_processes)},
          {"NODE_RANK", std::to_string(o.node_rank)},
          {"GROUP_RANK", std::to_string(o.node_rank)},
          {"TORCHELASTIC_RESTART_COUNT", std::to_string(attempt)},
          {"TORCHELASTIC_MAX_RESTARTS", std::to_string(o.max_restarts)},
          {"FORK_LAUNCHED", "1"},
          {"ACCELERATE_MIXED_PRECISION", o.mixed_precision},
          {"ACCELERATE_USE_CPU", o.cpu ? "True" : "False"}};
}

/// In the copy: calls the function and ends the process. What went wrong is written to `failure`.
[[noreturn]] void run_rank(const std::function<void()>& function, const std::map<std::string, std::string>& variables,
                           const Fd& failure) {
  std::string what;
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  int status = 1;
  try {
    function();
    status = 0;
  } catch (const Error& error) {
    what = error.what();
    status = error.exit_code();
  } catch (const std::exception& error) {
    what = error.what();
  } catch (...) {
    what = "an exception that is no std::exception";
  }
  std::fflush(nullptr);
  [[maybe_unused]] const ssize_t written = ::write(failure.get(), what.data(), std::min<size_t>(what.size(), 4096));
  // No destructors of static objects: they are the caller's.
  ::_exit(status);
}

/// Starts all ranks and waits for them. @return the one that failed first.
std::optional<Failure> run_all(const std::function<void()>& function, const FunctionLaunchOptions& o, int64_t port,
                               int64_t attempt) {
  std::vector<pid_t> pids;
  std::vector<Fd> failures;
  const pid_t parent = ::getpid();
  std::fflush(nullptr);  // or each copy would write what waits in the buffers
  const auto kill_all = [&] {
    for (const pid_t pid : pids)
      if (pid > 0) ::kill(pid, SIGKILL);
  };
  for (int64_t i = 0; i < o.num_processes; ++i) {
    Pipe pipe = make_pipe();
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      run_rank(function, environment(o, i, port, attempt), pipe.write);
    }
    if (pid < 0) {
      const std::string why = std::strerror(errno);
      kill_all();
      for (const pid_t started : pids) ::waitpid(started, nullptr, 0);
      raise<ResourceError>("launch_function: no process can be started: {}. See `ulimit -u`", why);
    }
    pids.push_back(pid);
    failures.push_back(std::move(pipe.read));
  }
  std::optional<Failure> first;
  for (size_t left = pids.size(); left > 0;) {
    int status = 0;
    const pid_t pid = ::waitpid(-1, &status, 0);
    if (pid < 0 && errno == EINTR) continue;
    if (pid < 0) raise<LaunchError>("launch_function: the processes can't be waited for: {}", std::strerror(errno));
    const auto found = std::find(pids.begin(), pids.end(), pid);
    if (found == pids.end()) continue;  // somebody else's child
    const auto index = static_cast<size_t>(found - pids.begin());
    *found = -1;
    --left;
    if (first || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
    char text[4096];
    const ssize_t got = ::read(failures[index].get(), text, sizeof(text));
    const std::string what(text, static_cast<size_t>(std::max<ssize_t>(0, got)));
    first = Failure{o.node_rank * o.num_processes + static_cast<int64_t>(index),
                    WIFSIGNALED(status) ? "was killed by " + signal_name(WTERMSIG(status))
                    : what.empty()      ? fmt::format("failed: exit code {}", WEXITSTATUS(status))
                                        : "failed: " + what};
    kill_all();
  }
  return first;
}

}  // namespace

void launch_function(const std::function<void()>& function, const FunctionLaunchOptions& options) {
  check(options);
  for (int64_t attempt = 0;; ++attempt) {
    const auto failure =
        run_all(function, options, options.use_port.value_or(0) > 0 ? *options.use_port : choose_port(), attempt);
    if (!failure) return;
    if (attempt >= options.max_restarts)
      raise<LaunchError>("launch_function: rank {} of {} {}{}", failure->rank,
                         options.num_processes * options.num_nodes, failure->what,
                         options.max_restarts > 0 ? fmt::format(" (after {} restarts)", options.max_restarts) : "");
  }
}

PatchedEnvironment::PatchedEnvironment(const std::map<std::string, std::string>& variables) {
  for (const auto& [name, value] : variables) {
    const char* old = std::getenv(name.c_str());
    before_.emplace_back(name, old ? std::optional<std::string>(old) : std::nullopt);
    ::setenv(name.c_str(), value.c_str(), 1);
  }
}

PatchedEnvironment::~PatchedEnvironment() {
  for (const auto& [name, value] : before_) {
    if (value) ::setenv(name.c_str(), value->c_str(), 1);
    else ::unsetenv(name.c_str());
  }
}

void set_numa_affinity(int64_t local_rank, int64_t local_world_size) {
  if (local_rank < 0 || local_rank >= local_world_size)
    raise<ConfigError>("set_numa_affinity: local_rank is {}, expected 0 to {}", local_rank, local_world_size - 1);
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (const int cpu : cores_of(Topology::current(), {}, local_rank, local_world_size)) CPU_SET(cpu, &cpus);
  if (::sched_setaffinity(0, sizeof(cpus), &cpus) != 0)
    raise<LaunchError>("set_numa_affinity: the system refuses: {}", std::strerror(errno));
}

}  // namespace accelerate
