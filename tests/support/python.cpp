#include "python.hpp"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iterator>

#include "ranks.hpp"

extern char** environ;

namespace support {
namespace {

/// python_server.py, started for the first script.
class PythonServer {
 public:
  PythonServer() {
    int in[2], out[2];
    if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0) std::abort();
    std::string program = python().value(),
                script = std::string(ACCELERATE_SOURCE_DIR) + "/tests/support/python_server.py";
    char* argv[] = {program.data(), script.data(), nullptr};
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    ::posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    pid_t pid = 0;
    if (::posix_spawn(&pid, program.c_str(), &actions, nullptr, argv, environ) != 0) std::perror(program.c_str());
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(in[0]);
    ::close(out[1]);
    requests_ = ::fdopen(in[1], "w");
    answers_ = ::fdopen(out[0], "r");
  }

  PythonResult run(const std::vector<std::string>& lines) {
    std::fprintf(requests_, "%zu\n", lines.size());
    for (const auto& line : lines) std::fprintf(requests_, "%s\n", line.c_str());
    std::fflush(requests_);
    PythonResult result;
    if (std::fscanf(answers_, "%d", &result.exit_code) != 1) return {.output = "python_server.py has ended"};
    std::ifstream output(lines.front());
    result.output.assign(std::istreambuf_iterator<char>(output), {});
    return result;
  }

 private:
  FILE *requests_ = nullptr, *answers_ = nullptr;  // open for as long as the program runs; then the server ends, too
};

}  // namespace

PythonResult run_python(const std::string& script, const std::vector<std::string>& arguments) {
  static PythonServer server;
  std::vector<std::string> lines{scratch_dir() + "/python_output." + std::to_string(::getpid()),
                                 std::string(ACCELERATE_SOURCE_DIR) + "/" + script};
  lines.insert(lines.end(), arguments.begin(), arguments.end());
  return server.run(lines);
}

}  // namespace support
