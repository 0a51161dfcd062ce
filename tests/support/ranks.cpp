#include "ranks.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string_view>
#include <thread>

#include "rank_server.hpp"

extern char** environ;

namespace support {
namespace {

struct Child {
  Rank process;
  int out = -1;
  bool running = true;
  RankResult result{};

  void read() {
    char buffer[4096];
    const ssize_t got = ::read(out, buffer, sizeof(buffer));
    if (got > 0) {
      result.output.append(buffer, static_cast<size_t>(got));
      return;
    }
    const int status = process.wait();
    ::close(out);
    running = false;
    result.ended = std::chrono::steady_clock::now();
    if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  }
  bool is_stopped() const {
    std::ifstream in("/proc/" + std::to_string(process.pid()) + "/stat");
    std::string text;
    std::getline(in, text);
    const size_t name_end = text.rfind(')');
    return name_end != std::string::npos && text.compare(name_end + 2, 1, "T") == 0;
  }
};

struct Job {
  std::vector<Child> children;
  std::chrono::steady_clock::time_point deadline;
  std::string waits_from;
  bool late = false;

  int64_t num_running() const {
    return std::count_if(children.begin(), children.end(), [](const Child& child) { return child.running; });
  }
  bool waits() const {
    return !waits_from.empty() && std::any_of(children.begin(), children.end(), [&](const Child& child) {
      return child.result.output.find(waits_from) != std::string::npos;
    });
  }
  void kill_what_stays() {
    if (const bool now_late = std::chrono::steady_clock::now() > deadline; now_late && !late) {
      late = true;
      for (auto& child : children)
        if (child.running)
          child.result.output += "\n[killed: the deadline of the test passed]\n", ::kill(child.process.pid(), SIGKILL);
    }
    if (num_running() == static_cast<int64_t>(children.size())) return;
    if (std::any_of(children.begin(), children.end(),
                    [](const Child& child) { return child.running && !child.is_stopped(); }))
      return;
    for (const auto& child : children)
      if (child.running) ::kill(child.process.pid(), SIGKILL);
  }
};

/// This process's environment with `variables` on top.
std::vector<std::string> environment_with(const std::vector<std::pair<std::string, std::string>>& variables) {
  std::vector<std::string> all;
  for (char** e = environ; *e; ++e) {
    const std::string_view entry(*e);
    const auto replaces = [&](const auto& variable) { return entry.starts_with(variable.first + "="); };
    if (std::none_of(variables.begin(), variables.end(), replaces)) all.emplace_back(entry);
  }
  for (const auto& [name, value] : variables) all.push_back(name + "=" + value);
  return all;
}

Child start(const std::vector<std::string>& arguments, const std::vector<std::pair<std::string, std::string>>& env) {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) std::abort();
  Child child{Rank({arguments, environment_with(env), fds[1]})};
  ::close(fds[1]);
  child.out = fds[0];
  return child;
}

/// The name of the case that runs, fit for a file name; empty between cases.
std::string name_of_case() {
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  if (!test) return {};
  auto name = std::string(test->test_suite_name()) + "." + test->name();
  std::replace(name.begin(), name.end(), '/', '-');
  return name;
}

std::string said(const std::string& what, int64_t rank) {
  return scratch_dir() + "/said " + what + " by " + std::to_string(rank) + " of " + std::to_string(world_size());
}

Job start_job(const std::vector<std::string>& arguments, const RankOptions& options) {
  const auto port = std::to_string(free_port());
  const auto world_size = std::to_string(options.world_size);
  Job job;
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
    job.children.push_back(start(arguments, env));
  }
  job.deadline = std::chrono::steady_clock::now() + options.deadline;
  job.waits_from = options.waits_from;
  return job;
}

}  // namespace

bool is_rank() { return std::getenv("ACCELERATE_TEST_RANK") != nullptr; }
int64_t rank() { return std::atoll(std::getenv("RANK")); }
int64_t world_size() { return std::atoll(std::getenv("WORLD_SIZE")); }

uint16_t free_port() {
  // Below the range from which the kernel takes ports for connections and for whoever asks for any: one of those could
  // be given to a test beside this one before the caller listens.
  std::random_device random;
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    const auto port = std::uniform_int_distribution<uint16_t>(10000, 32000)(random);
    address.sin_port = htons(port);
    const bool is_free = ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    ::close(fd);
    if (is_free) return port;
  }
  std::abort();
}

std::string scratch_dir() {
  if (const char* dir = std::getenv("ACCELERATE_TEST_DIR")) return dir;
  struct Owner {
    std::string path, of_case;
    Owner() : path((std::filesystem::temp_directory_path() / "accelerate_test_XXXXXX").string()) {
      if (!::mkdtemp(path.data())) std::abort();
    }
    ~Owner() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  };
  static Owner owner;
  const auto name = name_of_case();
  if (name.empty()) return owner.path;  // between cases, and in programs that are no GoogleTest
  const auto folder = owner.path + "/" + name;
  if (folder != owner.of_case) {
    std::filesystem::create_directory(folder);
    if (!owner.of_case.empty()) std::filesystem::remove_all(owner.of_case);
    owner.of_case = folder;
  }
  return folder;
}

void say(const std::string& what) { std::ofstream(said(what, rank())) << "said"; }

bool heard(const std::string& what, int64_t num_ranks, std::chrono::seconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (std::chrono::steady_clock::now() < end) {
    int64_t count = 0;
    for (int64_t r = 0; r < world_size(); ++r) count += std::filesystem::exists(said(what, r));
    if (count >= num_ranks) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

std::vector<RankResult> run_program(const std::vector<std::string>& arguments, const RankOptions& options) {
  return run_programs(arguments, {options}, 1)[0];
}

std::vector<std::vector<RankResult>> run_programs(const std::vector<std::string>& arguments,
                                                  const std::vector<RankOptions>& jobs, size_t at_a_time) {
  std::vector<Job> started;
  for (;;) {
    const auto running =
        std::count_if(started.begin(), started.end(), [](const Job& job) { return job.num_running() > 0; });
    if (running == 0 && started.size() == jobs.size()) break;
    const auto busy = std::count_if(started.begin(), started.end(),
                                    [](const Job& job) { return job.num_running() > 0 && !job.waits(); });
    if (started.size() < jobs.size() && busy < static_cast<std::ptrdiff_t>(at_a_time)) {
      started.push_back(start_job(arguments, jobs[started.size()]));
      continue;
    }
    std::vector<pollfd> fds;
    std::vector<Child*> owners;
    for (auto& job : started)
      for (auto& child : job.children)
        if (child.running) fds.push_back({child.out, POLLIN, 0}), owners.push_back(&child);
    ::poll(fds.data(), fds.size(), 200);
    for (size_t i = 0; i < fds.size(); ++i)
      if (fds[i].revents & (POLLIN | POLLHUP)) owners[i]->read();
    for (auto& job : started) job.kill_what_stays();
  }
  std::vector<std::vector<RankResult>> results;
  for (auto& job : started) {
    auto& ranks = results.emplace_back();
    for (auto& child : job.children) ranks.push_back(std::move(child.result));
  }
  return results;
}

std::vector<RankResult> run_test_in_ranks(const std::string& test_name, const RankOptions& options) {
  return run_program({"--gtest_filter=" + test_name, "--gtest_also_run_disabled_tests", "--gtest_color=no"}, options);
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
