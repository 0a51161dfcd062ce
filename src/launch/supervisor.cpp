#include "launch/supervisor.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <span>
#include <sstream>
#include <tuple>

#include "accelerate/utils/error.hpp"
#include "launch/affinity.hpp"
#include "launch/environment.hpp"
#include "launch/monitor/monitor.hpp"
#include "launch/output.hpp"
#include "launch/process.hpp"
#include "launch/program.hpp"
#include "launch/remote.hpp"
#include "launch/rendezvous.hpp"
#include "launch/warden.hpp"
#include "utils/step_file.hpp"

namespace accelerate::launcher {
namespace {

using std::chrono::milliseconds;

bool same_file(int a, int b) {
  struct stat first {
  }, second{};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

Fd open_log(const std::filesystem::path& file) {
  Fd fd(::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!fd) throw LaunchError("the log file " + file.string() + " can't be opened: " + std::strerror(errno));
  return fd;
}

/// Of ranks that failed within moments of each other, the least value is the likeliest cause; the others died of it.
///
/// The order in which the kernel reports ends is not enough: a dying process drops its connections first, and a peer
/// that dies of that may be reported before it. The kind of death tells more: nobody else causes a kill or an invalid
/// access, whereas exit code 69 is how a program of this library ends when a *peer* went away. Among equals the first
/// to have said its last word on stderr is the cause, since it spoke before it dropped its connections. Words long
/// before the end are about something else.
std::tuple<int, Clock::time_point, int64_t> blame(const RankRecord& rank) {
  const End& end = *rank.end;
  const bool recent = rank.last_word && *rank.last_word < end.at && end.at - *rank.last_word < std::chrono::seconds(2);
  return {blame_kind(end), recent ? *rank.last_word : end.at, rank.place};
}

class Supervisor {
 public:
  Supervisor(const Job& job, const LogFiles& logs, Agent* agent, Monitor* monitor)
      : job_(job),
        logs_(logs),
        agent_(agent),
        monitor_(monitor),
        // The monitor needs the last lines of a rank, and the lower part of the terminal.
        interactive_(!monitor && job.local_world_size == 1 && job.remote.empty() && ::isatty(STDIN_FILENO) &&
                     logs.folder().empty()),
        signals_(wanted_signals(interactive_, monitor)),
        out_(STDOUT_FILENO),
        err_(STDERR_FILENO),
        errors_(same_file(STDOUT_FILENO, STDERR_FILENO) ? &out_ : &err_),
        warden_(static_cast<size_t>(job.local_world_size),
                monitor && monitor->divides(errors_->fd()) ? errors_->fd() : -1, TerminalView::restore()) {
    if (interactive_) adopt_orphans();
    outcome_.ranks.resize(static_cast<size_t>(job.local_world_size));
  }

  ~Supervisor() {
    if (monitor_) monitor_->drop();
    for (const auto& rank : outcome_.ranks) {
      if (rank.pid <= 0) continue;
      ::kill(target(rank), SIGKILL);
      warden_.forget(target(rank));
      ::waitpid(rank.pid, nullptr, 0);
    }
    if (interactive_) kill_orphans();
  }

  Outcome run(const Host& host, std::string (*say)(const Job&, const LogFiles&, const Outcome&)) {
    if (monitor_) monitor_->begin(job_, *errors_, warden_);
    const auto command = job_.starts_ranks() ? command_line(job_, host) : std::vector<std::string>();
    for (int64_t i = 0; i < job_.local_world_size; ++i)
      start(i,
            job_.starts_ranks()   ? command
            : job_.remote.empty() ? job_.commands[static_cast<size_t>(i)]
                                  : remote_command(job_, host, static_cast<size_t>(i)),
            host);
    while (running_ > 0) turn();
    // The ranks are gone: what they left behind in their groups goes too. They are not reaped yet, so their numbers
    // can't have been given to others.
    send(SIGKILL);
    drain_until_ = Clock::now() + kDrain;
    while (!abandoned_ && Clock::now() < *drain_until_ && unfinished()) turn();
    drain_until_.reset();
    for (auto& forwarder : forwarders_) forwarder.finish();
    for (auto& rank : outcome_.ranks) fill_tail(rank);
    find_first_failure();
    if (monitor_) monitor_->end(statuses());
    errors_->write(this, say(job_, logs_, outcome_));
    while (!abandoned_ && (out_.pending() || err_.pending())) turn();
    return outcome_;
  }

 private:
  static constexpr milliseconds kDrain{
      1000};  // for output of processes that left a rank's group and still hold its pipe

  static std::vector<int> wanted_signals(bool interactive, const Monitor* monitor) {
    std::vector<int> wanted{SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
    if (!interactive) wanted.push_back(SIGTSTP);  // the terminal stops an interactive rank together with us
    if (monitor) wanted.push_back(SIGWINCH);
    return wanted;
  }

  /// What kill(2) takes to reach a rank and all that it started. An interactive rank stays in our group, which is the
  /// terminal's foreground.
  pid_t target(const RankRecord& rank) const { return interactive_ ? rank.pid : -rank.pid; }

  void send(int signal) {
    // A remote launcher stops when its input ends, and its shell returns when it has stopped. A shell without input is
    // stopped itself, which the launcher notices.
    if (!job_.remote_input.empty() && signal != SIGKILL) return tethers_.clear();
    for (const auto& rank : outcome_.ranks) {
      if (rank.pid <= 0 || (interactive_ && rank.end)) continue;
      ::kill(target(rank), signal);
      if (signal != SIGSTOP && signal != SIGKILL) ::kill(target(rank), SIGCONT);  // a stopped rank would not notice
    }
  }

  void start(int64_t local_rank, const std::vector<std::string>& command, const Host& host) {
    const RankLogs& logs = logs_.of(local_rank);
    auto environment =
        job_.starts_ranks() ? build_environment(job_, host, local_rank) : std::map<std::string, std::string>();
    if (!logs.error_file.empty()) environment["TORCHELASTIC_ERROR_FILE"] = logs.error_file;
    if (monitor_ && job_.starts_ranks()) environment[kStepFileVariable] = monitor_->step_file(local_rank);
    SpawnOptions spawning{.command = command, .environment = {}, .own_group = !interactive_};
    // Standard input goes to one rank at most; a terminal's can't be read from outside its foreground group.
    Fd nothing, out, err;
    if (!interactive_ && (local_rank > 0 || ::isatty(STDIN_FILENO))) {
      nothing = Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      spawning.in = nothing.get();
    }
    Pipe tether;
    if (!job_.remote_input.empty()) {
      tether = make_pipe();
      spawning.in = tether.read.get();
      [[maybe_unused]] const ssize_t written =
          ::write(tether.write.get(), job_.remote_input.data(), job_.remote_input.size());
      tethers_.push_back(std::move(tether.write));
    }
    auto& record = outcome_.ranks[static_cast<size_t>(local_rank)];
    const bool direct = !monitor_ && job_.local_world_size == 1 && job_.remote.empty();
    const std::string prefix = logs.prefix ? "[rank" + std::to_string(job_.rank(local_rank)) + "]:" : "";
    out = connect(direct, logs.stdout_on_terminal, logs.stdout_file, prefix, &out_);
    if (out && logs.stdout_on_terminal) streams_.push_back({local_rank, kStdout, forwarders_.size() - 1});
    err = connect(direct, logs.stderr_on_terminal, logs.stderr_file, prefix, errors_);
    if (err && logs.stderr_on_terminal) streams_.push_back({local_rank, kStderr, forwarders_.size() - 1});
    // A rank sees a pipe where the user sees a terminal: tell it how wide a progress bar may be.
    winsize size{};
    if (err && logs.stderr_on_terminal && ::isatty(STDERR_FILENO) && ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0)
      environment["ACCELERATE_LAUNCH_COLUMNS"] = std::to_string(size.ws_col ? size.ws_col : 80);
    spawning.out = out.get();
    spawning.err = err.get();
    spawning.environment = merged(host, environment);
    if (job_.settings.on("enable_cpu_affinity"))
      spawning.cpus = cores_of(topology(), visible_gpus(host), local_rank, job_.local_world_size);
    record.rank = job_.rank(local_rank);
    record.local_rank = local_rank;
    record.started = Clock::now();
    record.pid = spawn(spawning, signals_, warden_);
    ++running_;
  }

  const Topology& topology() {
    if (topology_.nodes.empty()) topology_ = Topology::current();
    return topology_;
  }

  /// The GPUs of --gpu_ids, else those of the caller's CUDA_VISIBLE_DEVICES; ranks use them in this order.
  std::vector<int64_t> visible_gpus(const Host& host) const {
    std::string list = job_.settings.text("gpu_ids");
    if (const auto found = host.environment.find("CUDA_VISIBLE_DEVICES");
        (list.empty() || list == "all") && found != host.environment.end())
      list = found->second;
    std::vector<int64_t> ids;
    std::istringstream text(list);
    for (int64_t id; text >> id; text.ignore()) ids.push_back(id);
    return ids;
  }

  /// The descriptor that a rank's stream becomes; none when it is the launcher's own.
  Fd connect(bool direct, bool on_terminal, const std::filesystem::path& file, const std::string& prefix, Sink* sink) {
    if (!on_terminal) return open_log(file);
    if (direct && file.empty()) return {};
    Pipe pipe = make_pipe();
    forwarders_.emplace_back(
        std::move(pipe.read),
        LineForwarder::Options{.sink = sink, .prefix = prefix, .log = file.empty() ? Fd() : open_log(file)});
    return std::move(pipe.write);
  }

  /// Waits for the next thing to happen and deals with it.
  void turn() {
    std::vector<pollfd> fds{{signals_.fd(), POLLIN, 0}};
    std::vector<LineForwarder*> readers;
    for (auto& forwarder : forwarders_)
      if (const int fd = forwarder.wants(); fd >= 0) fds.push_back({fd, POLLIN, 0}), readers.push_back(&forwarder);
    for (Sink* sink : {&out_, &err_})
      if (sink->pending()) fds.push_back({sink->fd(), POLLOUT, 0});
    const size_t agents = fds.size();
    if (agent_ && outcome_.recalled.empty()) fds.push_back({agent_->fd(), POLLIN, 0});
    const size_t monitors = fds.size();
    if (monitor_) monitor_->add_to(fds);
    ::poll(fds.data(), fds.size(), timeout());
    now_ = Clock::now();
    for (size_t i = 0; i < readers.size(); ++i)
      if (fds[i + 1].revents) readers[i]->read_some(now_);
    out_.flush();
    err_.flush();
    if (fds[0].revents) take_signals();
    if (agents < monitors && fds[agents].revents) recall();
    if (monitor_) monitor_->serve(std::span(fds).subspan(monitors));
    if (monitor_ && monitor_->sees() && now_ >= monitor_->next()) monitor_->look(now_, statuses());
    if (running_ == 0) {
      if (drain_until_ && (!out_.has_room() || !err_.has_room()))
        drain_until_ = now_ + kDrain;  // the reader is slow, not the ranks
    } else if (kill_at_ && now_ >= *kill_at_) {
      kill_now();
    } else if (stop_at_ && now_ >= *stop_at_) {
      stop_at_.reset();
      if (agent_) agent_->failing();
      ask(SIGTERM);
    }
  }

  void recall() {
    const auto why = agent_->recalled();
    if (!why) return;
    outcome_.recalled = *why;
    if (running_ == 0 || kill_at_) return;
    // Ranks that were failing anyway may do so by themselves first.
    if (!stop_at_) ask(SIGTERM);
  }

  int timeout() const {
    auto next = running_ == 0 ? drain_until_ : stop_at_ ? stop_at_ : kill_at_;
    if (monitor_ && monitor_->sees()) next = std::min(next.value_or(monitor_->next()), monitor_->next());
    if (!next) return -1;
    const auto left = std::chrono::ceil<milliseconds>(*next - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
  }

  bool unfinished() const {
    return out_.pending() || err_.pending() ||
           std::any_of(forwarders_.begin(), forwarders_.end(), [](const auto& f) { return !f.finished(); });
  }

  void take_signals() {
    signalfd_siginfo info;
    while (::read(signals_.fd(), &info, sizeof(info)) == sizeof(info)) {
      const int signal = static_cast<int>(info.ssi_signo);
      switch (signal) {
        case SIGCHLD:
          collect(static_cast<pid_t>(info.ssi_pid));
          break;
        case SIGUSR1:
        case SIGUSR2:
          send(signal);
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

  void give_terminal_back() {
    monitor_->leave();
    for (const auto until = Clock::now() + milliseconds(200); errors_->pending() && Clock::now() < until;) {
      pollfd ready{errors_->fd(), POLLOUT, 0};
      ::poll(&ready, 1, 10);
      errors_->flush();
    }
  }

  /// SIGINT, SIGTERM or SIGHUP. `from_terminal`: an interactive rank has received it as well.
  void stop_for(int signal, bool from_terminal) {
    if (running_ == 0) {
      abandoned_ = signal == SIGINT;  // nothing is left but output that nobody takes
      return;
    }
    // Tools that signal a process and its group deliver one Ctrl-C twice; a person is not that fast.
    if (signal == SIGINT && kill_at_ && now_ - asked_at_ > milliseconds(200)) return kill_now();
    if (outcome_.stop_signal) return;
    outcome_.stop_signal = signal;
    if (kill_at_) return;  // a rank failed: the others have been told already
    stop_at_.reset();
    ask(interactive_ && from_terminal ? 0 : signal);
  }

  void ask(int signal) {
    if (signal) send(signal);
    asked_at_ = now_;
    kill_at_ = asked_at_ + job_.options.grace;
  }

  void kill_now() {
    outcome_.killed = true;
    kill_at_ = Clock::now() + std::chrono::hours(1);  // a process that hangs in the kernel dies when it may
    send(SIGKILL);
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
    if (rank.end || ::waitid(P_PID, static_cast<id_t>(rank.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid == 0)
      return;
    End end{.at = now_, .asked = kill_at_.has_value()};
    (info.si_code == CLD_EXITED ? end.exit_code : end.signal) = info.si_status;
    rank.end = end;
    rank.place = job_.local_world_size - running_--;
    if (!end.good() && !kill_at_ && !stop_at_) stop_at_ = now_ + job_.options.monitor_interval;
  }

  /// Among the ranks that failed before anybody asked them to stop.
  void find_first_failure() {
    auto& first = outcome_.first_failure;
    for (size_t i = 0; i < outcome_.ranks.size(); ++i) {
      const auto& rank = outcome_.ranks[i];
      if (!rank.end->good() && !rank.end->asked && (!first || blame(rank) < blame(outcome_.ranks[*first]))) first = i;
    }
  }

  void fill_tail(RankRecord& rank) {
    constexpr std::streamoff kBytes = 16 << 10;
    for (const auto& [local_rank, stream, forwarder] : streams_)
      if (local_rank == rank.local_rank && stream == kStderr)
        rank.last_word = forwarders_[forwarder].last_word(), rank.stderr_tail = forwarders_[forwarder].tail();
    const auto& file = logs_.of(rank.local_rank).stderr_file;
    if (!file.empty() && rank.stderr_tail.empty()) rank.stderr_tail = end_of(file, kBytes);
  }

  static std::string end_of(const std::filesystem::path& file, std::streamoff bytes) {
    std::ifstream log(file, std::ios::binary | std::ios::ate);
    log.seekg(std::max<std::streamoff>(0, log.tellg() - bytes));
    return {std::istreambuf_iterator<char>(log), {}};
  }

  /// What a rank wrote last, on either stream: as it came through here, else the end of its log file.
  std::string last_line(const RankRecord& rank) const {
    std::optional<Clock::time_point> when;
    std::vector<std::string> last;
    for (const auto& [local_rank, stream, index] : streams_) {
      const auto& forwarder = forwarders_[index];
      if (local_rank != rank.local_rank || forwarder.tail().empty() || (when && forwarder.last_word() <= when))
        continue;
      when = forwarder.last_word();
      last = last_lines(forwarder.tail(), 1);
    }
    const RankLogs& logs = logs_.of(rank.local_rank);
    for (const auto* file : {&logs.stderr_file, &logs.stdout_file})
      if (last.empty() && !file->empty()) last = last_lines(end_of(*file, 4 << 10), 1);
    return last.empty() ? "" : last.front();
  }

  std::vector<Monitor::Status> statuses() const {
    std::vector<Monitor::Status> all;
    for (const auto& rank : outcome_.ranks) all.push_back({&rank, kill_at_.has_value(), last_line(rank)});
    return all;
  }

  /// An interactive rank has no group of its own; instead, what it leaves behind becomes our child.
  void adopt_orphans() {
    ::prctl(PR_GET_CHILD_SUBREAPER, &was_subreaper_);
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    not_ours_ = children_of_this_process();
  }

  void kill_orphans() {
    // Killing one may hand us its own children: look again until there are none, and give up on what can't be killed.
    for (int round = 0; round < 100; ++round) {
      bool found = false;
      for (pid_t pid : children_of_this_process())
        if (std::find(not_ours_.begin(), not_ours_.end(), pid) == not_ours_.end()) {
          found = true;
          ::kill(pid, SIGKILL);
          ::waitpid(pid, nullptr, 0);
        }
      if (!found) break;
    }
    ::prctl(PR_SET_CHILD_SUBREAPER, was_subreaper_);
  }

  const Job& job_;
  const LogFiles& logs_;
  Agent* const agent_;
  Monitor* const monitor_;
  const bool interactive_;  ///< the one rank of this machine shares the user's terminal
  Signals signals_;
  Sink out_, err_;
  Sink* errors_;  ///< out_ if both streams go to the same place, so that their lines don't mix either
  Warden warden_;
  Outcome outcome_;
  std::deque<LineForwarder> forwarders_;
  std::vector<Fd> tethers_;  ///< of remote launchers
  struct Stream {
    int64_t local_rank;
    Streams kind;
    size_t forwarder;
  };
  std::vector<Stream> streams_;  ///< those that pass through here
  int64_t running_ = 0;
  std::optional<Clock::time_point> stop_at_, kill_at_, drain_until_;
  Clock::time_point now_ = Clock::now(), asked_at_{};
  bool abandoned_ = false;
  int was_subreaper_ = 0;
  std::vector<pid_t> not_ours_;
  Topology topology_;
};

}  // namespace

// Nobody else causes a kill or an invalid access, whereas 69 is how a program of this library ends when a peer went
// away.
int blame_kind(const End& end) { return end.signal && end.signal != SIGABRT ? 0 : end.exit_code == 69 ? 2 : 1; }

int Outcome::exit_code() const {
  if (first_failure) return ranks[*first_failure].end->status();
  return stop_signal ? 128 + stop_signal : 0;
}

Outcome supervise(const Job& job, const Host& host, const LogFiles& logs,
                  std::string (*say)(const Job&, const LogFiles&, const Outcome&), Agent* agent, Monitor* monitor) {
  return Supervisor(job, logs, agent, monitor).run(host, say);
}

}  // namespace accelerate::launcher
