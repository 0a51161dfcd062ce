#include "launch/supervise/supervisor.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <iterator>
#include <map>
#include <optional>
#include <span>
#include <system_error>

#include "launch/job/environment.hpp"
#include "launch/job/host.hpp"
#include "launch/job/job.hpp"
#include "launch/monitor/monitor.hpp"
#include "launch/supervise/core_binding.hpp"
#include "launch/supervise/peers.hpp"
#include "launch/supervise/rank_streams.hpp"
#include "launch/supervise/stop_clock.hpp"
#include "launch/supervise/subreaper.hpp"
#include "launch/system/process.hpp"
#include "launch/system/warden.hpp"
#include "observe/save_points.hpp"
#include "observe/step_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::launcher {
namespace {

bool has_other_threads() {
  std::error_code ignored;
  return std::distance(std::filesystem::directory_iterator("/proc/self/task", ignored), {}) > 1;
}

class Supervisor {
 public:
  explicit Supervisor(const Supervision& s)
      : s_(s),
        job_(s.job),
        monitor_(s.monitor),
        // The monitor needs the last lines of a rank, and the lower part of the terminal.
        interactive_(!monitor_ && job_.remote.empty() && s.first_input.empty() && ::isatty(STDIN_FILENO)),
        signals_(wanted_signals(interactive_ && job_.local_world_size == 1, monitor_)),
        streams_(job_, s.logs, /*watched=*/monitor_ != nullptr),
        warden_(static_cast<size_t>(job_.local_world_size),
                monitor_ && monitor_->divides(streams_.errors().fd()) ? streams_.errors().fd() : -1,
                TerminalView::restore()),
        clock_(job_.monitor_interval, job_.grace),
        cores_(job_, s.host) {
    // An interactive rank has no group of its own; instead, what it leaves behind becomes our child.
    if (interactive_) subreaper_.emplace();
    outcome_.ranks.resize(static_cast<size_t>(job_.local_world_size));
  }

  ~Supervisor() {
    if (monitor_) monitor_->drop();
    for (const auto& rank : outcome_.ranks) {
      if (rank.pid <= 0) continue;
      ::kill(target(rank), SIGKILL);
      warden_.forget(target(rank));
      ::waitpid(rank.pid, nullptr, 0);
    }
  }

  Outcome run() {
    if (monitor_) monitor_->begin(job_, streams_.errors(), warden_);
    start_all();
    while (running_ > 0) poll_once();
    // The ranks are gone: what they left behind in their groups goes too. They are not reaped yet, so their numbers
    // can't have been given to others.
    send(SIGKILL);
    drain_until_ = Clock::now() + kDrain;
    while (!abandoned_ && Clock::now() < *drain_until_ && !streams_.finished()) poll_once();
    drain_until_.reset();
    streams_.close();
    for (auto& rank : outcome_.ranks) streams_.describe_end(rank);
    if (outcome_.saved() && told_usr1_ && !outcome_.stop_signal) outcome_.stop_signal = SIGUSR1;
    if (!outcome_.saved()) outcome_.first_failure = first_failure(outcome_.ranks);
    if (monitor_) monitor_->end(statuses());
    streams_.errors().write(this, s_.say(job_, s_.logs, outcome_));
    while (!abandoned_ && streams_.pending()) poll_once();
    return outcome_;
  }

 private:
  /// For output of processes that left a rank's group and still hold its pipe.
  static constexpr std::chrono::milliseconds kDrain{1000};
  /// How often ranks are looked at where SIGCHLD may not come, see other_threads_.
  static constexpr std::chrono::milliseconds kLook{50};

  /// @param all_interactive  the terminal stops all ranks together with us
  static std::vector<int> wanted_signals(bool all_interactive, const Monitor* monitor) {
    std::vector<int> wanted{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
    if (!all_interactive) wanted.push_back(SIGTSTP);
    if (monitor) wanted.push_back(SIGWINCH);
    return wanted;
  }

  // ---------------------------------------------------------------- starting ranks

  /// Thousands take a while, in which signals are heard and failures seen.
  void start_all() {
    for (int64_t i = 0; i < job_.local_world_size; ++i) {
      start(i);
      now_ = Clock::now();
      take_signals();
      if (!clock_.has_asked()) continue;
      outcome_.ranks.resize(static_cast<size_t>(i + 1));  // the others never were
      return;
    }
  }

  void start(int64_t local_rank) {
    const auto& command = s_.commands[s_.commands.size() == 1 ? 0 : static_cast<size_t>(local_rank)];
    SpawnOptions spawning{.command = command, .environment = {}, .own_group = !shares_terminal(local_rank)};
    auto& record = outcome_.ranks[static_cast<size_t>(local_rank)];
    const auto streams = streams_.connect(local_rank);
    spawning.out = streams.out.get();
    spawning.err = streams.err.get();
    const Fd input = input_for(local_rank);
    spawning.in = input.get();
    spawning.environment = merged(s_.host, environment_of(local_rank, streams));
    spawning.cpus = cores_.of(local_rank);
    record.rank = job_.rank(local_rank);
    record.local_rank = local_rank;
    record.started = Clock::now();
    record.pid = spawn(spawning, signals_, warden_);
    ++running_;
  }

  /// Standard input goes to one rank at most; a terminal's can't be read from outside its foreground group.
  Fd input_for(int64_t local_rank) {
    if (!s_.first_input.empty()) {
      Pipe tether = make_pipe();
      [[maybe_unused]] const ssize_t written =
          ::write(tether.write.get(), s_.first_input.data(), s_.first_input.size());
      tethers_.push_back(std::move(tether.write));
      return std::move(tether.read);
    }
    if (local_rank > 0 || (!interactive_ && ::isatty(STDIN_FILENO)))
      return Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    return {};
  }

  /// @param streams  what the rank has in the place of the launcher's own
  std::map<std::string, std::string> environment_of(int64_t local_rank, const RankStreams::Ends& streams) const {
    const RankLogs& logs = s_.logs.of(local_rank);
    std::map<std::string, std::string> environment;
    if (job_.starts_ranks()) environment = build_environment(job_, s_.host, local_rank);
    // Under DeepSpeed the reference leaves it to torchrun. Ranks with a thread for each core take these from each
    // other.
    if (job_.settings.launcher() == Launcher::deepspeed && job_.tells_ranks() && job_.local_world_size > 1 &&
        !s_.host.environment.contains("OMP_NUM_THREADS"))
      environment.insert({"OMP_NUM_THREADS", std::to_string(job_.settings.threads_per_process())});
    if (!logs.error_file.empty()) environment["TORCHELASTIC_ERROR_FILE"] = logs.error_file;
    if (monitor_ && job_.starts_ranks()) environment[kStepFileVariable] = monitor_->step_file(local_rank);
    // A rank sees a pipe where the user sees a terminal: tell it how wide a progress bar may be.
    winsize size{};
    if (streams.err && logs.stderr_on_terminal && ::isatty(STDERR_FILENO) &&
        ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0)
      environment["ACCELERATE_LAUNCH_COLUMNS"] = std::to_string(size.ws_col ? size.ws_col : 80);
    // Nor does it write lines one by one, as to a terminal: what a pipe or a file is to get is kept until it is much.
    if (job_.starts_ranks() && (streams.out || !::isatty(STDOUT_FILENO))) {
      environment["ACCELERATE_LAUNCH_LINES"] = "1";  // read by the library (state/lines_at_once)
      if (job_.tells_ranks() && !s_.host.environment.contains("PYTHONUNBUFFERED"))
        environment["PYTHONUNBUFFERED"] = "1";
    }
    return environment;
  }

  // ---------------------------------------------------------------- the loop

  /// Waits for the next thing to happen and deals with it.
  void poll_once() {
    std::vector<pollfd> fds{{signals_.fd(), POLLIN, 0}};
    streams_.add_to(fds);
    const size_t peers = fds.size();
    if (s_.peers && outcome_.recalled.empty()) fds.push_back({s_.peers->fd(), POLLIN, 0});
    const size_t monitors = fds.size();
    if (monitor_) monitor_->add_to(fds);
    ::poll(fds.data(), fds.size(), timeout());
    now_ = Clock::now();
    streams_.serve(std::span(fds).subspan(1, peers - 1), now_);
    if (fds[0].revents) take_signals();
    if (other_threads_) collect(0);
    if (peers < monitors && fds[peers].revents) hear_peers();
    if (monitor_ && monitor_->serve(std::span(fds).subspan(monitors)) && running_ > 0) ask_what_they_do();
    if (monitor_ && monitor_->watches() && now_ >= monitor_->next()) monitor_->look(now_, statuses());
    if (running_ > 0) stop_if_due();
    else if (drain_until_ && streams_.blocked()) drain_until_ = now_ + kDrain;  // the reader is slow, not the ranks
  }

  int timeout() const {
    auto next = running_ == 0 ? drain_until_ : clock_.next();
    if (monitor_ && monitor_->watches()) next = std::min(next.value_or(monitor_->next()), monitor_->next());
    if (const auto soon = Clock::now() + kLook; other_threads_ && running_ > 0)
      next = std::min(next.value_or(soon), soon);
    if (!next) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
  }

  std::vector<Monitor::Status> statuses() const {
    std::vector<Monitor::Status> all;
    for (const auto& rank : outcome_.ranks)
      all.push_back({&rank, clock_.has_asked(), streams_.last_line(rank.local_rank)});
    return all;
  }

  // ---------------------------------------------------------------- stopping ranks

  /// The first rank of this machine, where there is somebody to talk to it.
  bool shares_terminal(int64_t local_rank) const { return interactive_ && local_rank == 0; }

  /// The argument of kill(2) that reaches a rank and all that it started. An interactive rank stays in our group, which
  /// is the terminal's foreground.
  pid_t target(const RankRecord& rank) const { return shares_terminal(rank.local_rank) ? rank.pid : -rank.pid; }

  /// @param told  the terminal has sent it to our group, and so to an interactive rank
  void send(int signal, bool told = false) {
    // A remote launcher stops when its input ends, and its shell returns when it has stopped. A shell without input is
    // stopped itself, which the launcher notices.
    if (!s_.first_input.empty() && signal != SIGKILL) return tethers_.clear();
    for (const auto& rank : outcome_.ranks) {
      const bool interactive = shares_terminal(rank.local_rank);
      if (rank.pid <= 0 || (interactive && (told || rank.end))) continue;
      ::kill(target(rank), signal);
      if (signal != SIGSTOP && signal != SIGKILL) ::kill(target(rank), SIGCONT);  // a stopped rank would not notice
    }
  }

  void stop_if_due() {
    switch (clock_.due(now_)) {
      case StopClock::Due::nothing:
        break;
      case StopClock::Due::ask:
        if (s_.peers) s_.peers->failing();
        ask(SIGTERM);
        break;
      case StopClock::Due::kill:
        if (waits_for_savers()) clock_.wait_on(now_);
        else if (std::exchange(waited_for_savers_, false)) clock_.asked(now_);  // they end now, and may take as long
        else kill_now();
        break;
    }
  }

  void ask(int signal, bool told = false) {
    send(signal, told);
    clock_.asked(now_);
  }

  void kill_now() {
    outcome_.killed = true;
    clock_.killed(Clock::now());
    send(SIGKILL);
  }

  /// Ranks that this launcher has passed a signal on to may save before they end
  /// (ProjectConfiguration::save_on_signal), for as long as they say so; they give up by themselves where they can't.
  /// After a failure nobody can.
  bool waits_for_savers() {
    if (!outcome_.stop_signal) return false;
    std::vector<int64_t> savers;
    for (const auto& rank : outcome_.ranks) {
      if (rank.pid <= 0 || rank.end) continue;
      const auto processes = shares_terminal(rank.local_rank) ? std::vector{rank.pid} : members_of(rank.pid);
      if (std::any_of(processes.begin(), processes.end(),
                      [](pid_t pid) { return has_thread(pid, save_points::kSavingThread); }))
        savers.push_back(rank.rank);
    }
    if (savers.empty()) return false;
    waited_for_savers_ = true;
    if (!std::exchange(spoke_of_savers_, true) && !job_.quiet())
      streams_.errors().write(
          this, fmt::format("accelerate launch: rank {} is saving a checkpoint, for which this launcher waits beyond "
                            "--grace_seconds\n",
                            fmt::join(savers, ", ")));
    return true;
  }

  void hear_peers() {
    const auto why = s_.peers->recalled();
    if (!why) return;
    outcome_.recalled = *why;
    // Ranks that were failing anyway may do so by themselves first.
    if (running_ > 0 && !clock_.has_asked() && !clock_.waits_for_failures()) ask(SIGTERM);
  }

  // ---------------------------------------------------------------- signals

  void take_signals() {
    signalfd_siginfo info;
    while (::read(signals_.fd(), &info, sizeof(info)) == sizeof(info)) {
      const int signal = static_cast<int>(info.ssi_signo);
      switch (signal) {
        case SIGCHLD:
          collect(static_cast<pid_t>(info.ssi_pid));
          break;
        case SIGUSR1:
          told_usr1_ = true;
          send(signal);
          break;
        case SIGUSR2:
          ask_what_they_do();
          break;
        case SIGWINCH:
          monitor_->redraw();
          break;
        case SIGTSTP:
          send(SIGSTOP);
          if (monitor_) give_terminal_back();
          ::raise(SIGSTOP);  // returns when somebody continues us
          send(SIGCONT);
          if (monitor_) monitor_->redraw();
          break;
        default:
          stop_for(signal, info.ssi_code == SI_KERNEL);
          break;
      }
    }
  }

  /// SIGUSR2 makes ranks that use the library say what they do (observe/hang_report), and would end what has no handler
  /// for it: shells and helpers among the ranks' processes, and ranks that are still loading.
  void ask_what_they_do() {
    std::vector<std::string> deaf;
    for (const auto& rank : outcome_.ranks) {
      if (rank.pid <= 0 || rank.end) continue;
      bool heard = false;
      for (const pid_t pid : shares_terminal(rank.local_rank) ? std::vector{rank.pid} : members_of(rank.pid))
        if (handles(pid, SIGUSR2)) heard |= ::kill(pid, SIGUSR2) == 0;
      if (!heard) deaf.push_back(fmt::format("{} (process {})", rank.rank, rank.pid));
    }
    if (!deaf.empty())
      streams_.errors().write(
          this, fmt::format("accelerate launch: SIGUSR2 is not passed on to rank {}, which has no handler for it and "
                            "would end; a program has one from its first Accelerator or PartialState on\n",
                            fmt::join(deaf, ", ")));
  }

  void give_terminal_back() {
    monitor_->leave();
    Sink& terminal = streams_.errors();
    for (const auto until = Clock::now() + std::chrono::milliseconds(200);
         terminal.pending() && Clock::now() < until;) {
      pollfd ready{terminal.fd(), POLLOUT, 0};
      ::poll(&ready, 1, 10);
      terminal.flush();
    }
  }

  /// SIGINT, SIGTERM or SIGHUP. `from_terminal`: an interactive rank has received it as well.
  void stop_for(int signal, bool from_terminal) {
    if (running_ == 0) {
      abandoned_ = signal == SIGINT;  // nothing is left but output that nobody takes
      return;
    }
    // Tools that signal a process and its group deliver one Ctrl-C twice; a person is not that fast.
    if (signal == SIGINT && clock_.has_asked() && clock_.since_asked(now_) > std::chrono::milliseconds(200))
      return kill_now();
    if (outcome_.stop_signal) return;
    outcome_.stop_signal = signal;
    if (!clock_.has_asked()) ask(signal, from_terminal);  // else a rank failed, and they were told
  }

  /// Looks which ranks have ended, without reaping them: their numbers stay reserved until the end.
  /// @param first  the process whose end raised the signal; the signals of those that ended since then were merged into
  /// it.
  void collect(pid_t first) {
    for (auto& rank : outcome_.ranks)
      if (rank.pid == first) look_at(rank);
    for (auto& rank : outcome_.ranks) look_at(rank);
  }

  void look_at(RankRecord& rank) {
    siginfo_t info{};
    if (rank.pid <= 0 || rank.end ||
        ::waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0)
      return;
    End end{.at = now_, .asked = clock_.has_asked()};
    (info.si_code == CLD_EXITED ? end.exit_code : end.signal) = info.si_status;
    rank.end = end;
    rank.place = job_.local_world_size - running_--;
    if (!end.good()) clock_.failed(now_, blame_kind(end) == kOfAPeer);
  }

  const Supervision& s_;
  const Job& job_;
  Monitor* const monitor_;
  const bool interactive_;  ///< the first rank of this machine shares the user's terminal
  Signals signals_;
  /// A thread of the program that called launch() does not block SIGCHLD, so the kernel may give the signal to it,
  /// which ignores it.
  const bool other_threads_ = has_other_threads();
  RankStreams streams_;
  Warden warden_;
  StopClock clock_;
  const CoreBinding cores_;
  std::vector<Fd> tethers_;  ///< of what was started with `first_input`
  Outcome outcome_;
  int64_t running_ = 0;
  std::optional<Clock::time_point> drain_until_;
  Clock::time_point now_ = Clock::now();
  bool abandoned_ = false, told_usr1_ = false, spoke_of_savers_ = false, waited_for_savers_ = false;
  std::optional<Subreaper> subreaper_;
};

}  // namespace

Outcome supervise(const Supervision& supervision) { return Supervisor(supervision).run(); }

}  // namespace accelerate::launcher
