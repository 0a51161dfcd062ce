#include "rank_server.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <utility>

#include "process_server.hpp"
#include "utils/gloo_gives_way.hpp"
#include "utils/leave_libtorch.hpp"

extern char** environ;

namespace support {
namespace {

/// In the server's environment: the descriptor of its end of the socket.
constexpr const char* kServerVariable = "ACCELERATE_TEST_RANK_SERVER";

/// Variables that programs read while they are loaded, in front of main(): a fork can't change that any more.
std::vector<std::string> read_while_loading(const std::vector<std::string>& environment) {
  std::vector<std::string> found;
  for (const std::string_view prefix : {"OMP_", "GOMP_", "GTEST_", "LD_", "MALLOC_", "GLIBC_", "TORCH_", "MKL_"})
    for (const auto& variable : environment)
      if (variable.starts_with(prefix)) found.push_back(variable);
  std::sort(found.begin(), found.end());
  return found;
}

/// As a process of its own from main() on: its output, its group, its environment.
void become(RankStart& start) {
  ::dup2(start.output, 1);
  ::dup2(start.output, 2);
  ::setpgid(0, 0);
  environ = as_pointers(start.environment);
}

// Both ends of the socket are this program. The test sends 's' with a rank's output as descriptor, its arguments and
// its environment, and reads its pid; or 'w' with a pid, and reads the status of its end.

// --- The server's side -----------------------------------------------------------------------------------------------

int serve(int socket, char* program, int (*run)(int, char**)) {
  if (!has_one_thread("rank server")) return 125;
  while (const auto order = receive_order(socket)) {
    if (order->verb == 'w') {
      pid_t pid = 0;
      int status = 0;
      if (!receive_all(socket, &pid, sizeof(pid))) break;
      while (::waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) die("rank server: waitpid");
      send_all(socket, &status, sizeof(status));
      continue;
    }
    auto strings = receive_strings(socket);
    if (strings.size() != 2) break;
    // The rank's for as long as it lives.
    auto* start = new RankStart{std::move(strings[0]), std::move(strings[1]), order->descriptors.at(0)};
    const pid_t pid = ::fork();
    if (pid < 0) die("rank server: fork");
    if (pid == 0) {
      ::close(socket);
      become(*start);
      ::close(start->output);
      start->arguments.insert(start->arguments.begin(), program);
      return run(static_cast<int>(start->arguments.size()), as_pointers(start->arguments));
    }
    ::close(start->output);
    delete start;
    send_all(socket, &pid, sizeof(pid));
  }
  std::_Exit(0);  // the test has ended; nothing was done here that destructors would have to undo
}

// --- The test's side -------------------------------------------------------------------------------------------------

/// Forks and executes this program. `kept`: a descriptor that it inherits under the same number, or -1.
pid_t execute(RankStart& start, int kept) {
  // Everything that allocates happens in front of fork(): other threads may hold the allocator's lock.
  static const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  std::vector<std::string> words{program};
  words.insert(words.end(), start.arguments.begin(), start.arguments.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::vector<char*> envp;
  for (auto& variable : start.environment) envp.push_back(variable.data());
  envp.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) die("fork");
  if (pid > 0) return pid;
  ::dup2(start.output, 1);
  ::dup2(start.output, 2);
  ::setpgid(0, 0);
  if (kept >= 0) ::fcntl(kept, F_SETFD, 0);
  ::execve(program.c_str(), argv.data(), envp.data());
  ::_exit(127);
}

/// The test's end of the socket to the server that all its ranks come from.
struct Server {
  int socket = -1;
  std::vector<std::string> loaded_with;

  explicit Server(const RankStart& first) : loaded_with(read_while_loading(first.environment)) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) die("rank server: socketpair");
    RankStart start{{}, first.environment, 2};
    start.environment.push_back(kServerVariable + ("=" + std::to_string(ends[1])));
    execute(start, ends[1]);
    ::close(ends[1]);
    socket = ends[0];
  }
};

Server& server(const RankStart& first) {
  static Server only(first);
  return only;
}

}  // namespace

int main_or_rank_server(int argc, char** argv, int (*run)(int, char**)) {
  const char* socket = std::getenv(kServerVariable);
  return socket ? serve(std::atoi(socket), argv[0], run) : run(argc, argv);
}

Rank::Rank(const RankStart& start) {
  served_ = server(start).loaded_with == read_while_loading(start.environment);
  if (!served_) {
    RankStart own = start;
    pid_ = execute(own, -1);
    return;
  }
  const int socket = server(start).socket;
  send_order(socket, 's', {&start.output, 1});
  send_strings(socket, {start.arguments, start.environment});
  if (!receive_all(socket, &pid_, sizeof(pid_))) die("rank server: it has ended");
}

int Rank::wait() {
  int status = 0;
  if (!served_) {
    while (::waitpid(pid_, &status, 0) < 0)
      if (errno != EINTR) die("waitpid");
    return status;
  }
  const int socket = server({}).socket;
  send_order(socket, 'w');
  send_all(socket, &pid_, sizeof(pid_));
  if (!receive_all(socket, &status, sizeof(status))) die("rank server: it has ended");
  return status;
}

}  // namespace support
