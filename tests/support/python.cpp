#include "python.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "ranks.hpp"

extern char** environ;

namespace support {
namespace {

/// python_server.py: the one of ACCELERATE_TEST_PYTHON_SERVER, a socket, or one of this program's own.
class PythonServer {
 public:
  PythonServer() {
    const char* shared = std::getenv("ACCELERATE_TEST_PYTHON_SERVER");
    socket_ = shared && *shared ? connect_to(shared) : start();
    answers_ = ::fdopen(socket_, "r");  // open for as long as the program runs
  }

  PythonResult run(const std::vector<std::string>& words) {
    std::string text;
    for (const auto& word : words) text += (text.empty() ? "" : std::string(1, '\0')) + word;
    for (char** entry = environ; *entry; ++entry) text += '\0' + std::string(*entry);
    text.insert(0, std::to_string(text.size()) + "\n");
    for (size_t sent = 0; sent < text.size();) {
      const auto count = ::send(socket_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (count <= 0) break;
      sent += static_cast<size_t>(count);
    }
    PythonResult result;
    if (std::fscanf(answers_, "%d", &result.exit_code) != 1) return {.output = "python_server.py has ended"};
    std::ifstream output(words.front());
    result.output.assign(std::istreambuf_iterator<char>(output), {});
    return result;
  }

 private:
  static int connect_to(const char* path) {
    sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
    std::strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    const int ours = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (::connect(ours, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) std::perror(path);
    return ours;
  }

  static int start() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    std::string program = python().value(),
                script = std::string(ACCELERATE_SOURCE_DIR) + "/tests/support/python_server.py";
    char* argv[] = {program.data(), script.data(), nullptr};
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, ends[1], 0);
    pid_t pid = 0;
    if (::posix_spawn(&pid, program.c_str(), &actions, nullptr, argv, environ) != 0) std::perror(program.c_str());
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    return ends[0];
  }

  int socket_ = -1;
  FILE* answers_ = nullptr;
};

}  // namespace

PythonResult run_python(const std::string& script, const std::vector<std::string>& arguments) {
  static PythonServer server;
  std::vector<std::string> lines{scratch_dir() + "/python_output." + std::to_string(::getpid()),
                                 std::filesystem::current_path().string(),
                                 std::string(ACCELERATE_SOURCE_DIR) + "/" + script, std::to_string(arguments.size())};
  lines.insert(lines.end(), arguments.begin(), arguments.end());
  return server.run(lines);
}

}  // namespace support
