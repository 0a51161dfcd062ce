#include "rank_server.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string_view>

#include "utils/gloo_gives_way.hpp"
#include "utils/leave_libtorch.hpp"

extern char** environ;

namespace support {
namespace {

/// In the server's environment: the descriptor of its end of the socket.
constexpr const char* kServerVariable = "ACCELERATE_TEST_RANK_SERVER";

[[noreturn]] void die(const char* what) {
  std::perror(what);
  std::_Exit(125);
}

char** as_pointers(std::vector<std::string>& strings) {
  auto* pointers = new std::vector<char*>;  // for exec and for environ, which keep them
  for (auto& string : strings) pointers->push_back(string.data());
  pointers->push_back(nullptr);
  return pointers->data();
}

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

// --- The socket ------------------------------------------------------------------------------------------------------
// Both ends are this program. The test sends 's' with a rank's output as descriptor, the length of its strings, and
// them (how many are arguments, the arguments, the environment; each ends with '\0'), and reads the rank's pid; or 'w'
// with a pid, and reads the status of its end.

void send_all(int socket, const void* data, size_t size) {
  for (size_t sent = 0; sent < size;) {
    const ssize_t n = ::send(socket, static_cast<const char*>(data) + sent, size - sent, MSG_NOSIGNAL);
    if (n < 0 && errno != EINTR) die("rank server: send");
    if (n > 0) sent += static_cast<size_t>(n);
  }
}

/// False where the other end has closed the socket.
bool receive_all(int socket, void* data, size_t size) {
  for (size_t got = 0; got < size;) {
    const ssize_t n = ::recv(socket, static_cast<char*>(data) + got, size - got, 0);
    if (n == 0) return false;
    if (n < 0 && errno != EINTR) die("rank server: recv");
    if (n > 0) got += static_cast<size_t>(n);
  }
  return true;
}

/// One byte with a descriptor.
struct Order {
  char verb = 0;
  int descriptor = -1;
};

msghdr message_of(iovec& bytes, char (&control)[CMSG_SPACE(sizeof(int))]) {
  std::memset(control, 0, sizeof(control));
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  return message;
}

void send_order(int socket, Order order) {
  if (order.descriptor < 0) return send_all(socket, &order.verb, 1);
  iovec bytes{&order.verb, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message = message_of(bytes, control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &order.descriptor, sizeof(int));
  while (::sendmsg(socket, &message, MSG_NOSIGNAL) != 1)
    if (errno != EINTR) die("rank server: sendmsg");
}

std::optional<Order> receive_order(int socket) {
  Order order;
  iovec bytes{&order.verb, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message = message_of(bytes, control);
  ssize_t n = 0;
  while ((n = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC)) < 0)
    if (errno != EINTR) die("rank server: recvmsg");
  if (n == 0) return std::nullopt;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message)) std::memcpy(&order.descriptor, CMSG_DATA(header), sizeof(int));
  return order;
}

void send_strings(int socket, const RankStart& start) {
  std::string text = std::to_string(start.arguments.size()) + '\0';
  for (const auto* strings : {&start.arguments, &start.environment})
    for (const auto& string : *strings) text += string + '\0';
  const uint64_t size = text.size();
  send_all(socket, &size, sizeof(size));
  send_all(socket, text.data(), text.size());
}

RankStart receive_strings(int socket) {
  uint64_t size = 0;
  RankStart start;
  if (!receive_all(socket, &size, sizeof(size))) return start;
  std::string text(size, '\0');
  if (!receive_all(socket, text.data(), text.size())) return start;
  std::vector<std::string> strings;
  for (size_t begin = 0; begin < text.size(); begin += strings.back().size() + 1)
    strings.emplace_back(text.c_str() + begin);
  const auto environment = strings.begin() + 1 + std::atoll(strings.front().c_str());
  start.arguments.assign(strings.begin() + 1, environment);
  start.environment.assign(environment, strings.end());
  return start;
}

// --- The server's side -----------------------------------------------------------------------------------------------

int64_t num_threads() {
  int64_t count = 0;
  DIR* tasks = ::opendir("/proc/self/task");
  while (const dirent* entry = ::readdir(tasks)) count += entry->d_name[0] != '.';
  ::closedir(tasks);
  return count;
}

int serve(int socket, char* program, int (*run)(int, char**)) {
  // A fork takes only the calling thread along.
  if (num_threads() != 1) {
    std::fprintf(stderr, "rank server: found %ld threads in front of main(), expected 1\n", long{num_threads()});
    return 125;
  }
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
    auto* start = new RankStart(receive_strings(socket));  // the rank's for as long as it lives
    start->output = order->descriptor;
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
  send_order(socket, {'s', start.output});
  send_strings(socket, start);
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
  send_order(socket, {'w'});
  send_all(socket, &pid_, sizeof(pid_));
  if (!receive_all(socket, &status, sizeof(status))) die("rank server: it has ended");
  return status;
}

}  // namespace support
