#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

/// Tests with real processes: the parent starts the test program again once per rank (rank_server.hpp), with the
/// environment that the launcher would set.
namespace support {

/// How one rank ended.
struct RankResult {
  int exit_code = -1;  ///< exit status, or -1 when a signal ended it
  int signal = 0;      ///< the signal, or 0
  std::string output;  ///< stdout and stderr together
  std::chrono::steady_clock::time_point ended;
};

struct RankOptions {
  int64_t world_size = 2;
  std::chrono::seconds deadline{120};  ///< after which all ranks are killed and the test fails with their output
  std::vector<std::pair<std::string, std::string>> env;
  /// run_programs: what a rank says before all of them only wait. From then on another job may run beside this one.
  std::string waits_from = "";
};

/// True in a process that was started as a rank of a test.
bool is_rank();
int64_t rank();
int64_t world_size();

/// Runs this program with `arguments` in world_size processes and waits for all of them. Processes that are stopped are
/// killed when all others have ended.
std::vector<RankResult> run_program(const std::vector<std::string>& arguments, const RankOptions& options);

/// The same for several jobs, of which so many run at a time, besides those that wait.
std::vector<std::vector<RankResult>> run_programs(const std::vector<std::string>& arguments,
                                                  const std::vector<RankOptions>& jobs, size_t at_a_time);

/// Runs one GoogleTest case of this program in every rank.
std::vector<RankResult> run_test_in_ranks(const std::string& test_name, const RankOptions& options);

/// As above; every rank must exit with 0, else the test fails with the output of the ranks.
void expect_ranks_pass(const std::string& test_name, const RankOptions& options);

/// A TCP port on the loopback interface that was free a moment ago.
uint16_t free_port();

/// A fresh folder for the case that runs, the same path in all its ranks; gone when the next case asks for one, and at
/// the end.
std::string scratch_dir();

/// How ranks of a case tell each other what has happened where no group is left to say it through. `what` is said by
/// this rank; heard(what, n) waits until n ranks have said it. Returns false where `limit` passed first.
void say(const std::string& what);
bool heard(const std::string& what, int64_t num_ranks, std::chrono::seconds limit);

}  // namespace support

/// A test whose body runs in each of N processes, for every world size listed: RANKS_TEST(Comm, Gather, 2, 3) { … }
#define RANKS_TEST(suite, name, ...)                                                                 \
  static void suite##_##name##_body();                                                               \
  TEST(suite, name) {                                                                                \
    if (support::is_rank()) return suite##_##name##_body();                                          \
    for (int64_t n : {__VA_ARGS__}) support::expect_ranks_pass(#suite "." #name, {.world_size = n}); \
  }                                                                                                  \
  static void suite##_##name##_body()
