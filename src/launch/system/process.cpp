#include "launch/system/process.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "launch/system/warden.hpp"
#include "utils/raise.hpp"

namespace accelerate::launcher {

Pipe make_pipe() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0)
    raise<ResourceError>("no pipe can be opened: {}. See `ulimit -n`", std::strerror(errno));
  return {Fd(fds[0]), Fd(fds[1])};
}

Signals::Signals(const std::vector<int>& wanted) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (int signal : wanted) {
    struct sigaction current {};
    ::sigaction(signal, nullptr, &current);
    if (current.sa_handler != SIG_IGN) sigaddset(&set, signal);
  }
  ::pthread_sigmask(SIG_BLOCK, &set, &mask_);
  // Ignored SIGCHLD would reap our children unseen; a reader of our output that goes away must not kill us.
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &action, &sigchld_);
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, &sigpipe_);
  fd_ = Fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) raise<ResourceError>("signalfd: {}", std::strerror(errno));
}

Signals::~Signals() {
  signalfd_siginfo info;
  while (::read(fd_.get(), &info, sizeof(info)) == sizeof(info)) {
  }
  ::sigaction(SIGPIPE, &sigpipe_, nullptr);
  ::sigaction(SIGCHLD, &sigchld_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
}

namespace {

/// Why the kernel refuses to execute a file that is there and may be executed.
const char* probable_reason(int error) {
  switch (error) {
    case ENOEXEC:
      return ". It is neither a program for this kind of machine nor a script whose first line is #!interpreter";
    case ENOENT:
      return ". The file is there, so the interpreter that it names (first line #!..., or its dynamic loader) is "
             "missing";
    default:
      return "";
  }
}

std::vector<char*> as_the_system_takes(const std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (const auto& text : texts) {
    if (text.find('\0') != std::string::npos)
      raise<ConfigError>(
          "an argument or a variable of a process to start has a NUL byte behind '{}', at which the system would stop "
          "reading: take it out of the setting that it comes from",
          text.substr(0, std::min<size_t>(text.find('\0'), 100)));
    pointers.push_back(const_cast<char*>(text.c_str()));
  }
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

void raise_no_process() {
  raise<ResourceError>("no process can be started: {}. See `ulimit -u`", std::strerror(errno));
}

pid_t spawn(const SpawnOptions& options, const Signals& signals, const Warden& warden) {
  // All that allocates happens before fork(): other threads of the caller may hold the allocator's lock.
  auto argv = as_the_system_takes(options.command), envp = as_the_system_takes(options.environment);
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (const int cpu : options.cpus) CPU_SET(cpu, &cpus);
  Pipe failure = make_pipe();  // closed by a successful exec, else carries errno
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) raise_no_process();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);  // the parent died before the line above
    if (options.own_group) ::setpgid(0, 0);
    if (!options.cpus.empty()) ::sched_setaffinity(0, sizeof(cpus), &cpus);  // what fails here costs time only
    warden.watch(options.own_group ? -::getpid() : ::getpid());
    const int fds[3] = {options.in, options.out, options.err};
    bool good = true;
    for (int target = 0; target < 3; ++target)
      if (fds[target] >= 0) good = good && ::dup2(fds[target], target) >= 0;
    ::sigaction(SIGPIPE, &signals.caller_sigpipe(), nullptr);
    ::pthread_sigmask(SIG_SETMASK, &signals.caller_mask(), nullptr);
    if (good) ::execve(argv[0], argv.data(), envp.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t written = ::write(failure.write.get(), &error, sizeof(error));
    ::_exit(127);
  }
  if (options.own_group) ::setpgid(pid, pid);  // also here, so that the group exists whoever comes first
  failure.write.reset();
  int error = 0;
  ssize_t got = 0;
  do got = ::read(failure.read.get(), &error, sizeof(error));
  while (got < 0 && errno == EINTR);
  if (got <= 0) return pid;
  warden.forget(options.own_group ? -pid : pid);
  ::waitpid(pid, nullptr, 0);
  raise<LaunchError>("'{}' can't be executed: {}{}", options.command[0], std::strerror(error), probable_reason(error));
}

std::string program_beside_this(const std::string& name, const std::string& purpose) {
  std::error_code ignored;
  const std::string path = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path() / name;
  if (::access(path.c_str(), X_OK) != 0)
    raise<NotBuiltError>(
        "{} the program {}, which is not there. scripts/install.sh builds and installs all of them (in the build's "
        "folder: cmake --build . --target installed); was only this one copied?",
        purpose, path);
  return path;
}

std::vector<pid_t> children_of_this_process() {
  std::vector<pid_t> result;
  std::error_code ignored;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", ignored)) {
    std::ifstream children(task.path() / "children");
    for (pid_t pid = 0; children >> pid;) result.push_back(pid);
  }
  return result;
}

std::vector<pid_t> members_of(pid_t group) {
  std::vector<pid_t> result;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored))
    if (const auto pid = static_cast<pid_t>(std::atoi(entry.path().filename().c_str()));
        pid > 0 && ::getpgid(pid) == group)
      result.push_back(pid);
  return result;
}

bool handles(pid_t pid, int signal) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string word; status >> word;)
    if (uint64_t caught = 0; word == "SigCgt:" && status >> std::hex >> caught)
      return (caught >> (signal - 1) & 1) != 0;
  return false;
}

bool has_thread(pid_t pid, std::string_view name) {
  std::error_code ignored;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task", ignored)) {
    std::ifstream in(thread.path() / "comm");
    if (std::string line; std::getline(in, line) && line == name) return true;
  }
  return false;
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

}  // namespace accelerate::launcher
