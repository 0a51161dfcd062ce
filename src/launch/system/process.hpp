#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "utils/fd.hpp"

namespace accelerate::launcher {

using accelerate::Fd;

struct Pipe {
  Fd read, write;
};
/// @throws ResourceError when there are no descriptors left.
Pipe make_pipe();

/// Takes the signals that the launcher handles out of their usual ways for as long as it lives, and puts everything
/// back. They are read from fd(). Signals that the caller ignores (nohup, background jobs of scripts) stay ignored.
class Signals {
 public:
  explicit Signals(const std::vector<int>& wanted);
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  int fd() const { return fd_.get(); }
  const sigset_t& caller_mask() const { return mask_; }
  const struct sigaction& caller_sigpipe() const { return sigpipe_; }
  const struct sigaction& caller_sigchld() const { return sigchld_; }

 private:
  sigset_t mask_{};
  struct sigaction sigpipe_ {
  }, sigchld_{};
  Fd fd_;
};

struct SpawnOptions {
  std::vector<std::string> command;      ///< element 0: path of the file
  std::vector<std::string> environment;  ///< NAME=value
  int in = -1, out = -1, err = -1;       ///< what becomes descriptors 0, 1, 2; -1: as in the launcher
  std::vector<int> cpus;                 ///< logical cores that it may use; empty: as the launcher
  bool own_group = true;                 ///< the child leads a process group of its own
};

/// After a fork() that failed, whose reason is in errno. @throws ResourceError
[[noreturn]] void raise_no_process();

class Warden;

/// Starts a process that dies with the launcher: the kernel sees to the process itself, `warden`, where it is
/// registered, to what it starts. Returns when its program runs.
/// @throws LaunchError with the reason when the program can't be executed.
pid_t spawn(const SpawnOptions& options, const Signals& signals, const Warden& warden);

/// The path of a program that is installed beside this one. @param purpose  "several machines meet through", for the
/// message. @throws NotBuiltError when it is not there.
std::string program_beside_this(const std::string& name, const std::string& purpose);

/// The processes whose parent is this one (children of all threads' forks, and adopted orphans).
std::vector<pid_t> children_of_this_process();

/// All processes of a group; none when it is gone.
std::vector<pid_t> members_of(pid_t group);

/// Whether a process has a handler of its own for a signal; false when it is gone.
bool handles(pid_t pid, int signal);

/// Whether one of its threads has this name; false when it is gone.
bool has_thread(pid_t pid, std::string_view name);

/// "SIGKILL" for 9.
std::string signal_name(int signal);

}  // namespace accelerate::launcher
