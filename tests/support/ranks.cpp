#include "ranks.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

extern char** environ;

namespace support {
namespace {

std::string this_program() { return std::filesystem::read_symlink("/proc/self/exe"); }

struct Child {
  pid_t pid = -1;
  int out = -1;
  bool running = true;
  RankResult result;
};

Child start(const std::vector<std::string>& arguments, const std::vector<std::pair<std::string, std::string>>& env) {
  // Everything that allocates happens before fork(): other threads may hold the allocator's lock.
  const std::string program = this_program();
  std::vector<char*> argv{const_cast<char*>(program.c_str())};
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  std::vector<std::string> variables;
  for (char** e = environ; *e; ++e) {
    const std::string_view entry(*e);
    bool replaced = false;
    for (const auto& [key, value] : env) replaced |= entry.starts_with(key + "=");
    if (!replaced) variables.emplace_back(entry);
  }
  for (const auto& [key, value] : env) variables.push_back(key + "=" + value);
  std::vector<char*> envp;
  for (auto& variable : variables) envp.push_back(variable.data());
  envp.push_back(nullptr);
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) std::abort();
  Child child;
  child.pid = ::fork();
  if (child.pid == 0) {
    ::dup2(fds[1], 1);
    ::dup2(fds[1], 2);
    ::setpgid(0, 0);
    ::execve(program.c_str(), argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(fds[1]);
  child.out = fds[0];
  return child;
}

}  // namespace

bool is_rank() { return std::getenv("ACCELERATE_TEST_RANK") != nullptr; }
int64_t rank() { return std::atoll(std::getenv("RANK")); }
int64_t world_size() { return std::atoll(std::getenv("WORLD_SIZE")); }

uint16_t free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (::bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    std::abort();
  ::close(fd);
  return ntohs(address.sin_port);
}

std::string scratch_dir() {
  if (const char* dir = std::getenv("ACCELERATE_TEST_DIR")) return dir;
  struct Owner {
    std::string path;
    Owner() : path((std::filesystem::temp_directory_path() / "accelerate_test_XXXXXX").string()) {
      if (!::mkdtemp(path.data())) std::abort();
    }
    ~Owner() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  };
  static Owner owner;
  return owner.path;
}

std::vector<RankResult> run_program(const std::vector<std::string>& arguments, const RankOptions& options) {
  const auto port = std::to_string(free_port());
  const auto world_size = std::to_string(options.world_size);
  std::vector<Child> children;
  for (int64_t rank = 0; rank < options.world_size; ++rank) {
    std::vector<std::pair<std::string, std::string>> env{
        {"RANK", std::to_string(rank)}, {"LOCAL_RANK", std::to_string(rank)},
        {"WORLD_SIZE", world_size},     {"LOCAL_WORLD_SIZE", world_size},
        {"MASTER_ADDR", "127.0.0.1"},   {"MASTER_PORT", port},
        {"ACCELERATE_USE_CPU", "true"}, {"OMP_NUM_THREADS", "1"},
        {"ACCELERATE_TEST_RANK", "1"},  {"ACCELERATE_TEST_DIR", scratch_dir()},
        {"GTEST_OUTPUT", ""},           {"GTEST_TOTAL_SHARDS", "1"},
        {"GTEST_SHARD_INDEX", "0"}};
    for (const auto& extra : options.env) {
      std::erase_if(env, [&](const auto& entry) { return entry.first == extra.first; });
      env.push_back(extra);
    }
    children.push_back(start(arguments, env));
  }
  const auto deadline = std::chrono::steady_clock::now() + options.deadline;
  bool late = false;
  for (;;) {
    std::vector<pollfd> fds;
    std::vector<Child*> owners;
    for (auto& child : children)
      if (child.running) fds.push_back({child.out, POLLIN, 0}), owners.push_back(&child);
    if (fds.empty()) break;
    ::poll(fds.data(), fds.size(), 200);
    for (size_t i = 0; i < fds.size(); ++i) {
      if (!(fds[i].revents & (POLLIN | POLLHUP))) continue;
      char buffer[4096];
      const ssize_t got = ::read(fds[i].fd, buffer, sizeof(buffer));
      if (got > 0) {
        owners[i]->result.output.append(buffer, static_cast<size_t>(got));
        continue;
      }
      int status = 0;
      ::waitpid(owners[i]->pid, &status, 0);
      ::close(owners[i]->out);
      owners[i]->running = false;
      if (WIFEXITED(status)) owners[i]->result.exit_code = WEXITSTATUS(status);
      if (WIFSIGNALED(status)) owners[i]->result.signal = WTERMSIG(status);
    }
    if (!late && std::chrono::steady_clock::now() > deadline) {
      late = true;
      for (auto& child : children)
        if (child.running)
          child.result.output += "\n[killed: the deadline of the test passed]\n", ::kill(child.pid, SIGKILL);
    }
  }
  std::vector<RankResult> results;
  for (auto& child : children) results.push_back(std::move(child.result));
  return results;
}

std::vector<RankResult> run_test_in_ranks(const std::string& test_name, const RankOptions& options) {
  return run_program({"--gtest_filter=" + test_name, "--gtest_color=no"}, options);
}

void expect_ranks_pass(const std::string& test_name, const RankOptions& options) {
  const auto results = run_test_in_ranks(test_name, options);
  for (size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(results[rank].exit_code, 0) << test_name << ": rank " << rank << " of " << options.world_size
                                          << " ended with signal " << results[rank].signal << "\n"
                                          << results[rank].output;
    EXPECT_NE(results[rank].output.find("[  PASSED  ] 1 test."), std::string::npos)
        << "rank " << rank << " ran no test";
  }
}

}  // namespace support
