#include "program_server.hpp"

#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "process_server.hpp"

namespace support {
namespace {

/// A process that was forked, and who waits for it.
struct Served {
  int socket;  ///< of from_program_server; -1 when that has been killed
  pid_t pid;
  int end;  ///< readable when the process has ended
};

/// Its file begins with the folder, then come the arguments and the environment.
int become(const Order& order, std::vector<std::vector<std::string>>& strings, char* program,
           int (*run)(int argc, char** argv)) {
  ::setpgid(0, 0);
  for (int i = 0; i < 3; ++i) ::dup2(order.descriptors.at(static_cast<size_t>(i)), i);
  for (const int descriptor : order.descriptors) ::close(descriptor);
  if (::chdir(strings.at(0).at(0).c_str()) != 0) die("program server: chdir");
  environ = as_pointers(strings.at(2));
  // OpenMP has read its number while it was loaded.
  if (const char* threads = std::getenv("OMP_NUM_THREADS"))
    if (auto* const set = reinterpret_cast<void (*)(int)>(::dlsym(RTLD_DEFAULT, "omp_set_num_threads")))
      set(std::atoi(threads));
  auto& arguments = strings.at(1);
  arguments.insert(arguments.begin(), program);
  return run(static_cast<int>(arguments.size()), as_pointers(arguments));
}

int listen_at(const std::string& path) {
  const std::string not_yet = path + "~";
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  if (not_yet.size() >= sizeof(address.sun_path)) errno = ENAMETOOLONG, die(not_yet.c_str());
  std::strcpy(address.sun_path, not_yet.c_str());
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0 || ::bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(listener, SOMAXCONN) != 0 || std::rename(not_yet.c_str(), path.c_str()) != 0)
    die(path.c_str());
  return listener;
}

int serve(const char* path, char* program, int (*run)(int argc, char** argv)) {
  if (!has_one_thread("program server")) return 125;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int listener = listen_at(path);
  std::vector<Served> all;
  for (;;) {
    std::vector<pollfd> looks{{listener, POLLIN, 0}};
    for (const auto& one : all) looks.push_back({one.end, POLLIN, 0}), looks.push_back({one.socket, POLLIN, 0});
    while (::poll(looks.data(), looks.size(), -1) < 0)
      if (errno != EINTR) die("program server: poll");
    for (size_t i = all.size(); i-- > 0;) {
      auto& one = all[i];
      if (looks[1 + 2 * i].revents != 0) {
        int status = 0;
        ::waitpid(one.pid, &status, 0);
        static_cast<void>(::send(one.socket, &status, sizeof(status), MSG_NOSIGNAL));
        ::close(one.end), ::close(one.socket);
        all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
      } else if (looks[2 + 2 * i].revents != 0) {
        ::kill(one.pid, SIGKILL);
        ::close(std::exchange(one.socket, -1));
      }
    }
    if (looks[0].revents == 0) continue;
    const int socket = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) continue;
    const auto order = receive_order(socket);
    auto strings = receive_strings(socket);
    if (!order || strings.size() != 3) {
      ::close(socket);
      continue;
    }
    const pid_t pid = ::fork();
    if (pid < 0) die("program server: fork");
    if (pid == 0) {
      for (const auto& one : all) ::close(one.end), ::close(one.socket);
      ::close(listener), ::close(socket);
      // For as long as it lives.
      return become(*order, *new auto(std::move(strings)), program, run);
    }
    for (const int descriptor : order->descriptors) ::close(descriptor);
    all.push_back({socket, pid, static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))});
  }
}

}  // namespace

int main_or_program_server(int argc, char** argv, int (*run)(int argc, char** argv)) {
  const char* path = std::getenv(kProgramServerVariable);
  return path ? serve(path, argv[0], run) : run(argc, argv);
}

}  // namespace support
