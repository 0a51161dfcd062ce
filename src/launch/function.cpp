#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
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
#include "launch/job/outcome.hpp"
#include "launch/job/require.hpp"
#include "launch/supervise/stop_clock.hpp"
#include "launch/system/affinity.hpp"
#include "launch/system/ports.hpp"
#include "launch/system/process.hpp"

namespace accelerate {
namespace {

using namespace launcher;

void check(const FunctionLaunchOptions& o) {
  require(o.num_processes >= 1, "launch_function: num_processes is {}, but at least 1 process is needed",
          o.num_processes);
  require(o.num_nodes >= 1 && o.node_rank >= 0 && o.node_rank < o.num_nodes,
          "launch_function: node_rank is {}, expected 0 to num_nodes - 1 (num_nodes is {})", o.node_rank, o.num_nodes);
  require(o.num_nodes == 1 || (o.use_port && o.master_addr != "127.0.0.1"),
          "launch_function: several machines need master_addr and use_port, the same on all of them");
  require(o.max_restarts >= 0, "launch_function: max_restarts can't be negative");
  require(o.monitor_interval.count() >= 0, "launch_function: monitor_interval can't be negative");
  require(o.rdzv_backend == "static",
          "launch_function: rdzv_backend is '{}', expected 'static': machines are told their node_rank here. Start the "
          "program with `accelerate launch --rdzv_backend {}`, whose agents agree on it",
          o.rdzv_backend, o.rdzv_backend);
  require(o.rdzv_conf.empty(),
          "launch_function: rdzv_conf sets '{}', expected nothing, since no agents meet here that it could be for. "
          "InitProcessGroupKwargs::timeout says how long processes wait for each other; else start the program with "
          "`accelerate launch --rdzv_conf`",
          o.rdzv_conf.empty() ? "" : o.rdzv_conf.begin()->first);
  require(o.log_line_prefix_template.empty(),
          "launch_function: log_line_prefix_template is '{}', expected nothing, since the processes write to the "
          "standard streams themselves. Put the rank into log lines by ACCELERATE_LOG_RANK=true, or start the program "
          "with `accelerate launch --tee 3`",
          o.log_line_prefix_template);
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

/// With rdzv_endpoint in the places that it is short for. @throws ConfigError
FunctionLaunchOptions resolve(FunctionLaunchOptions o) {
  if (o.rdzv_endpoint.empty()) return o;
  const FunctionLaunchOptions defaults;
  const auto colon = o.rdzv_endpoint.rfind(':');
  const std::string host = o.rdzv_endpoint.substr(0, colon);
  require(!host.empty(), "launch_function: rdzv_endpoint is '{}', expected host or host:port", o.rdzv_endpoint);
  require(o.master_addr == defaults.master_addr || o.master_addr == host,
          "launch_function: master_addr is '{}' and rdzv_endpoint '{}', expected one of them", o.master_addr,
          o.rdzv_endpoint);
  o.master_addr = host;
  if (colon == std::string::npos) return o;
  const std::string digits = o.rdzv_endpoint.substr(colon + 1);
  const int64_t port = digits.size() <= 5 && digits.find_first_not_of("0123456789") == std::string::npos
                           ? std::strtoll(digits.c_str(), nullptr, 10)
                           : 0;
  require(port >= 1 && port <= 65535, "launch_function: rdzv_endpoint is '{}', expected a port from 1 to 65535",
          o.rdzv_endpoint);
  require(o.use_port.value_or(port) == port,
          "launch_function: use_port is {} and rdzv_endpoint '{}', expected one of them", o.use_port.value_or(port),
          o.rdzv_endpoint);
  o.use_port = port;
  return o;
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
          {"TORCHELASTIC_RUN_ID", o.rdzv_id},
          {"TORCHELASTIC_RESTART_COUNT", std::to_string(attempt)},
          {"TORCHELASTIC_MAX_RESTARTS", std::to_string(o.max_restarts)},
          {"FORK_LAUNCHED", "1"},
          {"ACCELERATE_MIXED_PRECISION", o.mixed_precision},
          {"ACCELERATE_USE_CPU", o.cpu ? "True" : "False"}};
}

/// In the copy: calls the function and ends the process. Its error is written to `failure`.
[[noreturn]] void run_rank(const std::function<void()>& function, const std::map<std::string, std::string>& variables,
                           const Signals& signals, const Fd& failure) {
  std::string what;
  ::sigaction(SIGPIPE, &signals.caller_sigpipe(), nullptr);
  ::sigaction(SIGCHLD, &signals.caller_sigchld(), nullptr);
  ::pthread_sigmask(SIG_SETMASK, &signals.caller_mask(), nullptr);
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

/// Copies of this process, one for each rank of this machine.
class Copies {
 public:
  Copies(const std::function<void()>& function, const FunctionLaunchOptions& o, int64_t port, int64_t attempt)
      : clock_(o.monitor_interval, std::chrono::milliseconds(0)), world_size_(o.num_processes * o.num_nodes) {
    const pid_t parent = ::getpid();
    std::fflush(nullptr);  // or each copy would write what waits in the buffers
    for (int64_t i = 0; i < o.num_processes; ++i) {
      Pipe pipe = make_pipe();
      const pid_t pid = ::fork();
      if (pid == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (::getppid() != parent) ::_exit(1);
        run_rank(function, environment(o, i, port, attempt), signals_, pipe.write);
      }
      if (pid < 0) {
        const std::string why = std::strerror(errno);
        kill_all();
        for (const auto& started : ranks_) ::waitpid(started.pid, nullptr, 0);
        raise<ResourceError>("launch_function: no process can be started: {}. See `ulimit -u`", why);
      }
      ::fcntl(pipe.read.get(), F_SETFL, O_NONBLOCK);
      ranks_.push_back({.rank = o.node_rank * o.num_processes + i, .local_rank = i, .pid = pid});
      words_.push_back(std::move(pipe.read));
    }
  }

  /// Waits for all. @return the rank that caused the failures, and how it ended.
  std::optional<std::string> wait() {
    for (running_ = ranks_.size(); running_ > 0;) {
      sleep();
      now_ = Clock::now();
      for (auto& rank : ranks_)
        if (!rank.end) look_at(rank);
      if (clock_.due(now_) == StopClock::Due::nothing) continue;
      kill_all();
      clock_.asked(now_);
      clock_.killed(now_);
    }
    const auto first = first_failure(ranks_);
    if (!first) return std::nullopt;
    const RankRecord& rank = ranks_[*first];
    return fmt::format("rank {} of {} {}", rank.rank, world_size_,
                       rank.end->signal           ? "was killed by " + signal_name(rank.end->signal)
                       : rank.stderr_tail.empty() ? fmt::format("failed: exit code {}", rank.end->exit_code)
                                                  : "failed: " + rank.stderr_tail);
  }

 private:
  void kill_all() const {
    for (const auto& rank : ranks_)
      if (!rank.end) ::kill(rank.pid, SIGKILL);
  }

  /// Until something may have happened.
  void sleep() {
    std::vector<pollfd> polled{{signals_.fd(), POLLIN, 0}};
    for (const auto& word : words_) polled.push_back({word.get(), POLLIN, 0});
    const auto next = clock_.next();
    const auto left = next ? std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now()).count() : -1;
    ::poll(polled.data(), polled.size(), next ? static_cast<int>(std::clamp<int64_t>(left, 0, 60000)) : -1);
    signalfd_siginfo info;
    while (::read(signals_.fd(), &info, sizeof(info)) > 0) {
    }
  }

  /// Its message about its failure, right before its end.
  void hear(RankRecord& rank) {
    Fd& word = words_[static_cast<size_t>(rank.local_rank)];
    char text[4096];
    while (word) {
      const ssize_t got = ::read(word.get(), text, sizeof(text));
      if (got < 0) return;  // nothing for now
      if (got == 0) return word.reset();
      rank.stderr_tail.append(text, static_cast<size_t>(got));
      rank.last_word = now_;
    }
  }

  void look_at(RankRecord& rank) {
    siginfo_t info{};
    const bool ended = ::waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG) == 0 && info.si_pid != 0;
    hear(rank);
    if (!ended) return;
    words_[static_cast<size_t>(rank.local_rank)].reset();  // which a process that it has left may have, too
    End end{.at = now_, .asked = clock_.has_asked()};
    (info.si_code == CLD_EXITED ? end.exit_code : end.signal) = info.si_status;
    rank.end = end;
    rank.place = static_cast<int64_t>(ranks_.size() - running_--);
    if (!end.good()) clock_.failed(now_, blame_kind(end) == kOfAPeer);
  }

  const Signals signals_{{}};
  StopClock clock_;
  const int64_t world_size_;
  std::vector<RankRecord> ranks_;
  std::vector<Fd> words_;
  size_t running_ = 0;
  Clock::time_point now_{};
};

}  // namespace

void launch_function(const std::function<void()>& function, const FunctionLaunchOptions& given) {
  const FunctionLaunchOptions options = resolve(given);
  check(options);
  for (int64_t attempt = 0;; ++attempt) {
    const int64_t port = options.use_port.value_or(0) > 0 ? *options.use_port : choose_port();
    const auto failure = Copies(function, options, port, attempt).wait();
    if (!failure) return;
    if (attempt >= options.max_restarts)
      raise<LaunchError>("launch_function: {}{}", *failure,
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
