// The table of failures in docs/troubleshooting.md: every way in which a rank can stop talking, in every engine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <random>

#include "failing_jobs.hpp"
#include "program.hpp"
#include "ranks.hpp"

using testing::AnyOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif
constexpr int kSlower = kSanitized ? 5 : 1;
// Seconds after which a job is killed, and of the process group's timeout: of a failure that shows by itself all must
// have ended long before that; else ranks ask who is missing when it has passed. They must meet within it, too: 18
// processes on two cores, which idle ones do in 2.
constexpr int kDeadline = 240 * kSlower, kBySelf = 2 * kDeadline, kAsked = 30 * kSlower;
constexpr size_t kAtATime = 6;  ///< jobs in which nothing has happened yet
const std::string kHappened = "[fault at ";

/// A sanitizer's allocator ends the process, and it must be the first library.
bool can_happen(const std::string& way) { return !kSanitized || (way != "out of memory" && way != "clock jumps"); }

/// How a rank ends.
struct End {
  int exit_code;
  int signal = 0;
};
constexpr End kKilled{-1, SIGKILL};

/// A cell of the table.
struct Case {
  std::string job, way;
  int64_t rank;                   ///< to whom it happens
  End own;                        ///< how that one ends
  int others;                     ///< exit code of the others
  int timeout;                    ///< of the process group, in seconds
  std::vector<std::string> says;  ///< by each of the others
  bool sockets = false;           ///< ranks don't share memory, as on several machines
};

std::vector<std::pair<std::string, std::string>> environment_of(const Case& one, const std::string& folder) {
  std::vector<std::pair<std::string, std::string>> environment{{"FAULT_JOB", one.job},
                                                               {"FAULT_WAY", one.way},
                                                               {"FAULT_RANK", std::to_string(one.rank)},
                                                               {"FAULT_FOLDER", folder},
                                                               {"FAULT_TIMEOUT", std::to_string(one.timeout)},
                                                               {"TORCH_SHOW_CPP_STACKTRACES", "0"}};
  if (one.sockets) environment.emplace_back("ACCELERATE_SHARED_MEMORY", "0");
  if (one.way == "clock jumps")
    environment.emplace_back("LD_PRELOAD", std::string(ACCELERATE_BIN_DIR) + "/libwild_clock.so");
  return environment;
}

const std::vector<std::string> kProgram{"--gtest_filter=FailureTable.DISABLED_Rank", "--gtest_also_run_disabled_tests",
                                        "--gtest_color=no"};

/// When it happened, as the rank said.
std::chrono::steady_clock::time_point moment_in(const std::string& output) {
  const size_t at = output.find(kHappened);
  if (at == std::string::npos) return {};
  return std::chrono::steady_clock::time_point(
      std::chrono::nanoseconds(std::stoll(output.substr(at + kHappened.size()))));
}

/// The time from the event to the end of the last rank but those that are stopped.
double seconds_of(const std::vector<support::RankResult>& ranks, size_t who) {
  const auto begin = moment_in(ranks[who].output);
  if (begin == std::chrono::steady_clock::time_point()) return 0;
  auto end = begin;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (rank != who || ranks[rank].signal == 0) end = std::max(end, ranks[rank].ended);
  return std::chrono::duration<double>(end - begin).count();
}

void check(const Case& one, const std::vector<support::RankResult>& ranks) {
  const auto who = static_cast<size_t>(one.rank);
  const double seconds = seconds_of(ranks, who);
  std::printf("%-11s%-8s %-21s %5.2f s\n", one.job.c_str(), one.sockets ? "sockets" : "", one.way.c_str(), seconds);
  SCOPED_TRACE(one.job + (one.sockets ? " through sockets: " : ": ") + one.way);
  EXPECT_THAT(ranks[who].output, HasSubstr(kHappened));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& result = ranks[rank];
    SCOPED_TRACE("rank " + std::to_string(rank) + "\n" + result.output);
    EXPECT_EQ(result.exit_code, rank == who ? one.own.exit_code : one.others);
    EXPECT_EQ(result.signal, rank == who ? one.own.signal : 0);
    for (const auto& text : one.says)
      if (rank != who) {
        EXPECT_THAT(result.output, HasSubstr(text));
      }
  }
}

const std::string kText = "the tokenizer has no vocabulary";
const std::string kStopped = " has gone or is stopped: its process does not answer";

/// Training.
std::vector<Case> usual(const std::string& job, bool sockets = false) {
  const std::vector<Case> cases{
      {job, "killed", 1, kKilled, 69, kBySelf, {"on rank ", "rank 1 "}},
      {job, "killed", 0, kKilled, 69, kBySelf, {"on rank ", "rank 0 "}},
      {job, "stopped", 1, kKilled, 69, kAsked, {"on rank ", "rank 1" + kStopped}},
      {job, "stopped", 0, kKilled, 69, kAsked, {"on rank ", "rank 0" + kStopped}},
      {job, "throws before", 1, {1}, 69, kBySelf, {"on rank ", "rank 1 failed: " + kText}},
      {job, "throws within", 1, {1}, 69, kBySelf, {"on rank ", "rank 1 failed: " + kText}},
      {job, "throws after", 1, {1}, 69, kBySelf, {"on rank ", "rank 1 failed: " + kText}},
      {job, "exits 0", 1, {0}, 69, kBySelf, {"on rank ", "rank 1 has left: it ended normally"}},
      {job, "other order", 1, {69}, 69, kAsked, {"on rank ", "rank 1 ", "gather"}},
      {job, "different shapes", 1, {69}, 69, kBySelf, {"gather: the ranks are about to do", "Process 1: "}},
      {job, "different parameters", 1, {65}, 65, kBySelf, {"the model differs between ranks"}},
      {job, "out of memory", 1, {73}, 69, kBySelf, {"on rank ", "rank 1 failed: ", "can't allocate memory"}},
      {job, "disk full", 1, {73}, 65, kBySelf, {"on rank 1: ", "Free some space"}},
      {job, "clock jumps", 1, {0}, 0, kBySelf, {}},  // it goes on to its end
  };
  std::vector<Case> result;
  for (Case one : cases) {
    one.sockets = sockets;
    result.push_back(one);
  }
  return result;
}

/// The usual, but for some.
std::vector<Case> usual_but(const std::string& job, const std::vector<Case>& others) {
  auto cases = usual(job);
  for (const Case& other : others) std::erase_if(cases, [&](const Case& one) { return one.way == other.way; });
  cases.insert(cases.end(), others.begin(), others.end());
  return cases;
}

std::vector<Case> ddp() { return usual("ddp"); }

// Collectives of one kind and of different sizes.
std::vector<Case> ddp_through_sockets() {
  auto cases = usual("ddp", true);
  cases.push_back({"ddp", "models swapped", 1, {69}, 69, kAsked, {"on rank ", "rank 1 "}, true});
  // Work that the transport still waits for does not hold up the others' end.
  cases.push_back({"ddp", "throws and stays", 1, kKilled, 69, kBySelf, {"rank 1 failed: " + kText}, true});
  return cases;
}

std::vector<Case> fsdp() { return usual("fsdp"); }

std::vector<Case> fsdp_through_sockets() {
  auto cases = usual("fsdp", true);
  cases.push_back({"fsdp", "models swapped", 1, {69}, 69, kAsked, {"on rank ", "rank 1 "}, true});
  return cases;
}

std::vector<Case> pipeline() {
  const std::string job = "pipeline";
  return usual_but(job, {{job, "stopped", 1, kKilled, 69, kAsked, {"on rank ", "rank 1", kStopped}},
                         {job, "stopped", 0, kKilled, 69, kAsked, {"on rank ", "rank 0", kStopped}},
                         {job, "throws within", 1, {1}, 69, kBySelf, {"on rank ", "rank 1 failed: pipeline: " + kText}},
                         {job, "other order", 1, {69}, 69, kBySelf, {"Process 1: gather of [2]"}},
                         {job, "different shapes", 1, {69}, 69, kBySelf, {"rank 1 expected from rank 0 tensor 0"}}});
}

// Rank 0 reads.
std::vector<Case> dispatcher() {
  const std::string job = "dispatcher", reader = "rank 0 failed to read a batch that this rank shares";
  auto cases = usual_but(job, {{job, "throws within", 0, {1}, 69, kBySelf, {reader, kText}},
                               {job, "out of memory", 0, {73}, 69, kBySelf, {reader, "can't allocate memory"}},
                               {job, "different shapes", 0, {65}, 69, kBySelf, {reader}},
                               {job, "other order", 1, {69}, 69, kBySelf, {"Process 1: gather of [2]"}}});
  std::erase_if(cases, [](const Case& one) { return one.way == "different parameters"; });  // it has none
  return cases;
}

// Sharded; rank 0 writes the user's object.
std::vector<Case> checkpoint() {
  const std::string job = "checkpoint";
  return usual_but(job,
                   {{job, "throws within", 0, {1}, 65, kBySelf, {"on rank 0: " + kText}},
                    {job, "out of memory", 0, {73}, 65, kBySelf, {"on rank 0: ", "can't allocate memory"}},
                    {job, "different shapes", 1, {65}, 65, kBySelf, {"'1.bias': the file has [64], the model [32]"}},
                    {job, "other order", 1, {69}, 69, kBySelf, {"Process 1: gather of [2]"}}});
}

/// By the names of their tests.
const std::map<std::string, std::vector<Case> (*)()> kTables{{"Ddp", ddp},
                                                             {"DdpThroughSockets", ddp_through_sockets},
                                                             {"Fsdp", fsdp},
                                                             {"FsdpThroughSockets", fsdp_through_sockets},
                                                             {"Pipeline", pipeline},
                                                             {"Dispatcher", dispatcher},
                                                             {"Checkpoint", checkpoint}};

struct Outcome {
  Case what;
  std::vector<support::RankResult> ranks;
};

/// The jobs of all tables whose tests are to run, at once: where ranks wait until a timeout has passed, others train.
/// @return by table
std::map<std::string, std::vector<Outcome>> run_tables() {
  const auto* suite = testing::UnitTest::GetInstance()->current_test_suite();
  std::vector<std::pair<std::string, Case>> cases;
  for (int i = 0; i < suite->total_test_count(); ++i) {
    const auto* test = suite->GetTestInfo(i);
    const auto table = kTables.find(test->name());
    if (!test->should_run() || table == kTables.end()) continue;
    for (const Case& one : table->second())
      if (can_happen(one.way)) cases.emplace_back(table->first, one);
  }
  // The cases that wait longest begin first.
  std::stable_partition(cases.begin(), cases.end(), [](const auto& entry) { return entry.second.timeout == kAsked; });
  std::vector<support::RankOptions> jobs;
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto folder = fs::path(support::scratch_dir()) / std::to_string(i);
    fs::create_directory(folder);
    jobs.push_back({.world_size = 3,
                    .deadline = std::chrono::seconds(kDeadline),
                    .env = environment_of(cases[i].second, folder.string()),
                    .waits_from = kHappened});
  }
  auto results = support::run_programs(kProgram, jobs, kAtATime);
  std::map<std::string, std::vector<Outcome>> outcomes;
  for (size_t i = 0; i < cases.size(); ++i)
    outcomes[cases[i].first].push_back({cases[i].second, std::move(results[i])});
  return outcomes;
}

void check_table() {
  static const auto outcomes = run_tables();
  const auto& table = outcomes.at(testing::UnitTest::GetInstance()->current_test_info()->name());
  EXPECT_GE(table.size(), 11U);
  for (const auto& [what, ranks] : table) check(what, ranks);
}

}  // namespace

// The program of all ranks.
TEST(FailureTable, DISABLED_Rank) { std::exit(failing::run()); }

TEST(FailureTable, Ddp) { check_table(); }
TEST(FailureTable, DdpThroughSockets) { check_table(); }
TEST(FailureTable, Fsdp) { check_table(); }
TEST(FailureTable, FsdpThroughSockets) { check_table(); }
TEST(FailureTable, Pipeline) { check_table(); }
TEST(FailureTable, Dispatcher) { check_table(); }
TEST(FailureTable, Checkpoint) { check_table(); }

// The exit code of the job, and what it leaves behind. Not under 3 s: each rank loads LibTorch.
TEST(FailureTable, UnderTheLauncher) {
  struct Job {
    std::string way;
    int exit_code;
    std::string says;
  };
  std::vector<Job> jobs{{"killed", 128 + SIGKILL, "rank 1 of 2 failed first: it was killed by signal 9"},
                        {"stopped", 69, "rank 1 has gone or is stopped: its process does not answer"},
                        {"throws within", 1, "rank 1 of 2 failed first: it ended with exit code 1"},
                        {"exits 0", 69, "rank 1 has left"},
                        {"other order", 69, "gather"},
                        {"out of memory", 73, "rank 1 of 2 failed first: it ended with exit code 73"}};
  std::erase_if(jobs, [](const Job& job) { return !can_happen(job.way); });
  for (size_t first = 0; first < jobs.size(); first += kAtATime) {
    std::vector<std::unique_ptr<cli_test::Program>> programs;
    std::vector<std::string> folders;
    for (size_t i = first; i < std::min(first + kAtATime, jobs.size()); ++i) {
      const auto folder = fs::path(support::scratch_dir()) / std::to_string(i);
      fs::create_directory(folder);
      folders.push_back(folder.string());
      std::vector<std::string> arguments{cli_test::accelerate_path(), "launch", "--cpu",
                                         "--num_processes",           "2",      fs::read_symlink("/proc/self/exe")};
      arguments.insert(arguments.end(), kProgram.begin(), kProgram.end());
      cli_test::Program::Options options;
      const Case one{
          .job = "ddp", .way = jobs[i].way, .rank = 1, .own = {0}, .others = 0, .timeout = kAsked, .says = {}};
      for (const auto& [name, value] : environment_of(one, folder.string())) options.env.push_back(name + "=" + value);
      programs.push_back(std::make_unique<cli_test::Program>(arguments, options));
    }
    for (size_t i = 0; i < programs.size(); ++i) {
      const auto result = programs[i]->wait();
      SCOPED_TRACE(jobs[first + i].way + "\n" + result.err);
      EXPECT_EQ(result.exit_code, jobs[first + i].exit_code);
      EXPECT_THAT(result.err, HasSubstr(jobs[first + i].says));
      for (const pid_t pid : cli_test::pids_in(folders[i] + "/pids", 2)) EXPECT_TRUE(cli_test::gone(pid)) << pid;
    }
  }
}

// ACCELERATE_TEST_KILLS of them.
TEST(FailureTable, KilledAtRandom) {
  const char* wanted = std::getenv("ACCELERATE_TEST_KILLS");
  std::mt19937 random(static_cast<unsigned>(wanted ? std::random_device()() : 5));
  const auto any = [&](int64_t most) { return std::uniform_int_distribution<int64_t>(0, most)(random); };
  const std::vector<std::string> names{"ddp", "fsdp", "pipeline", "dispatcher", "checkpoint"};
  std::vector<Case> cases;
  std::vector<support::RankOptions> jobs;
  for (int i = 0; i < (wanted ? std::stoi(wanted) : 8); ++i) {
    cases.push_back({.job = names[static_cast<size_t>(any(4))],
                     .way = "killed at random",
                     .rank = any(2),
                     .own = kKilled,
                     .others = 69,
                     .timeout = kAsked,  // also while they meet
                     .says = {},
                     .sockets = any(1) == 1});
    const auto folder = fs::path(support::scratch_dir()) / std::to_string(i);
    fs::create_directory(folder);
    jobs.push_back({.world_size = 3,
                    .deadline = std::chrono::seconds(kDeadline),
                    .env = environment_of(cases.back(), folder.string())});
    // The ranks meet within some 20 ms.
    jobs.back().env.emplace_back("FAULT_AFTER_US", std::to_string(any(i % 2 ? 20000 : 1000000)));
  }
  const auto results = support::run_programs(kProgram, jobs, kAtATime);
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto who = static_cast<size_t>(cases[i].rank);
    const double seconds = seconds_of(results[i], who);
    SCOPED_TRACE(testing::Message() << cases[i].job << (cases[i].sockets ? " through sockets, rank " : ", rank ") << who
                                    << " after " << jobs[i].env.back().second << " us, " << seconds << " s");
    for (size_t rank = 0; rank < results[i].size(); ++rank) {
      const auto& result = results[i][rank];
      SCOPED_TRACE("rank " + std::to_string(rank) + "\n" + result.output);
      if (rank == who && result.signal == SIGKILL) continue;
      EXPECT_EQ(result.signal, 0);
      EXPECT_THAT(result.exit_code, AnyOf(0, 69)) << "0: it had done its work before";
    }
  }
}
