#pragma once

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>

/// A piece of work in a process of its own, with as much memory and time as it may have.
namespace hostile {

struct Outcome {
  int exit_code = -1;  ///< -1 when a signal ended it
  int signal = 0;
  bool late = false;   ///< was killed at the deadline: it waited for something
  std::string output;  ///< both streams
};

/// Bytes of address space that this process has.
inline uint64_t address_space() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

/// @return its process, which calls `begin` and does not come back from it
template <class Begin> pid_t start_child(const Begin& begin, bool execs) {
  if (!execs) {
    const pid_t child = ::fork();
    if (child == 0) begin();
    return child;
  }
  alignas(64) static char stack[1 << 18];
  return ::clone(
      [](void* given) {
        (*static_cast<const Begin*>(given))();
        return 0;
      },
      stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, const_cast<Begin*>(&begin));
}

/// Forks: the caller has no thread but this one, or none that holds a lock.
/// @param bytes  of address space
/// @param work   what the child does, and its exit status
/// @param execs  it does nothing but replace the process by a program, without allocating: a child that shares this
/// process's pages until then starts at once, however much this process holds
template <class Work> Outcome run_limited(uint64_t bytes, Work&& work, bool execs = false) {
  constexpr rlim_t kProcessorSeconds = 20;
  constexpr std::chrono::seconds kDeadline{60};
  int pipe[2];
  if (::pipe(pipe) != 0) return {};
  const auto begin = [&] {
    ::setpgid(0, 0);
    ::dup2(pipe[1], 1), ::dup2(pipe[1], 2);
    ::close(pipe[0]), ::close(pipe[1]);
    const rlimit memory{bytes, bytes}, time{kProcessorSeconds, kProcessorSeconds}, core{0, 0};
    ::setrlimit(RLIMIT_AS, &memory), ::setrlimit(RLIMIT_CPU, &time), ::setrlimit(RLIMIT_CORE, &core);
    ::_exit(work());
  };
  const pid_t child = start_child(begin, execs);
  ::setpgid(child, child);
  ::close(pipe[1]);
  Outcome outcome;
  const auto end = std::chrono::steady_clock::now() + kDeadline;
  for (char buffer[4096];;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    pollfd readable{pipe[0], POLLIN, 0};
    if (left.count() <= 0 || ::poll(&readable, 1, static_cast<int>(left.count())) == 0) {
      outcome.late = true;
      break;
    }
    const auto got = ::read(pipe[0], buffer, sizeof buffer);
    if (got <= 0) break;
    outcome.output.append(buffer, static_cast<size_t>(got));
  }
  if (outcome.late) ::kill(-child, SIGKILL);
  ::close(pipe[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
  return outcome;
}

/// The bytes that reading a file may take.
inline uint64_t allowed_bytes(int64_t file_bytes) {
  return (uint64_t{64} << 20) + 20 * static_cast<uint64_t>(file_bytes);
}

}  // namespace hostile
