// In the place of a program that a test starts by a launcher: see program_server.hpp.
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "process_server.hpp"
#include "program_server.hpp"

int main(int argc, char** argv) {
  const char* path = std::getenv(support::kProgramServerVariable);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  if (!path || std::strlen(path) >= sizeof(address.sun_path)) errno = EINVAL, support::die("from_program_server");
  std::strcpy(address.sun_path, path);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0 || ::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    support::die(path);
  std::vector<std::string> environment;
  for (char** variable = environ; *variable; ++variable) environment.emplace_back(*variable);
  support::send_order(socket, 's', std::array{0, 1, 2});
  support::send_strings(socket, {{std::filesystem::current_path()}, {argv + 1, argv + argc}, std::move(environment)});
  int status = 0;
  if (!support::receive_all(socket, &status, sizeof(status))) {
    errno = ECONNRESET;
    support::die("from_program_server: the server has ended");
  }
  if (!WIFSIGNALED(status)) return WEXITSTATUS(status);
  ::signal(WTERMSIG(status), SIG_DFL);
  ::raise(WTERMSIG(status));
}
