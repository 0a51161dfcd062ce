#include "foreground.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "utils/fd.hpp"
#include "utils/raise.hpp"

namespace cli {
namespace {

using accelerate::Fd;
using accelerate::LaunchError;
using accelerate::raise;

/// Takes signals out of their usual ways for as long as it lives. Those that the caller ignores stay ignored.
class HeldSignals {
 public:
  HeldSignals() {
    sigemptyset(&held_);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGCHLD}) sigaddset(&held_, signal);
    struct sigaction usual {};
    usual.sa_handler = SIG_DFL;  // children whose end is ignored leave no exit code
    ::sigaction(SIGCHLD, &usual, &before_chld_);
    sigprocmask(SIG_BLOCK, &held_, &before_);
  }
  ~HeldSignals() {
    sigprocmask(SIG_SETMASK, &before_, nullptr);
    ::sigaction(SIGCHLD, &before_chld_, nullptr);
  }
  HeldSignals(const HeldSignals&) = delete;
  const sigset_t& held() const { return held_; }
  const sigset_t& before() const { return before_; }

 private:
  sigset_t held_{}, before_{};
  struct sigaction before_chld_ {};
};

[[noreturn]] void become_program(const std::vector<std::string>& command, pid_t parent, const sigset_t& mask,
                                 int report) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(127);  // it has died meanwhile
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  std::vector<char*> argv;
  for (const auto& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
  const int error = errno;
  (void)!::write(report, &error, sizeof(error));
  ::_exit(127);
}

}  // namespace

int run_in_foreground(const std::vector<std::string>& command) {
  std::fflush(nullptr);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    raise<accelerate::ResourceError>("'{}' can't be started: no pipe: {}", command[0], std::strerror(errno));
  const Fd read_end(ends[0]);
  Fd write_end(ends[1]);
  const HeldSignals signals;
  const pid_t parent = ::getpid(), child = ::fork();
  if (child == 0) become_program(command, parent, signals.before(), write_end.get());
  if (child < 0)
    raise<accelerate::ResourceError>("'{}' can't be started: no process: {}", command[0], std::strerror(errno));
  write_end.reset();
  int error = 0, status = 0;
  if (::read(read_end.get(), &error, sizeof(error)) == sizeof(error)) {
    ::waitpid(child, &status, 0);
    raise<LaunchError>("'{}' can't be started: {}. Check its name, its path and its rights to be executed.", command[0],
                       std::strerror(error));
  }
  for (;;) {
    siginfo_t info{};
    const int signal = sigwaitinfo(&signals.held(), &info);
    if (signal == SIGCHLD) {
      if (::waitpid(child, &status, WNOHANG) == child) break;
    } else if (signal > 0 && info.si_code != SI_KERNEL) {  // SI_KERNEL: the terminal's, which has told the child, too
      ::kill(child, signal);
    }
  }
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace cli
