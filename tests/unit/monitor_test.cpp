// The parts of `accelerate launch --monitor`: text, table, rates, processes, HTTP. The whole is in
// tests/cli/monitor_cli_test.cpp.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "input/plain_text.hpp"
#include "launch/monitor/gpus.hpp"
#include "launch/monitor/history.hpp"
#include "launch/monitor/process_trees.hpp"
#include "launch/monitor/snapshot.hpp"
#include "launch/monitor/step_counter.hpp"
#include "launch/monitor/web_page.hpp"
#include "ranks.hpp"

namespace {

using namespace accelerate;
using namespace accelerate::launcher;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// ---------------------------------------------------------------- text

TEST(PlainText, LeavesWhatAPersonReads) {
  EXPECT_EQ(plain_text("loss 0.5 é 漢字 🙂"), "loss 0.5 é 漢字 🙂");
  EXPECT_EQ(plain_text("a\tb"), "a b");
  EXPECT_EQ(plain_text("\033[1;31mred\033[0m and \033[38;5;12mblue\033[m"), "red and blue");
  EXPECT_EQ(plain_text("\033]0;a title\a after"), " after");
  EXPECT_EQ(plain_text("\033]8;;http://x\033\\link\033]8;;\033\\."), "link.");
  EXPECT_EQ(plain_text("\033Pdevice string\033\\x\033(Bx\0337x\033cx"), "xxxx");
  EXPECT_EQ(plain_text(std::string_view("a\0b\b\x7f\r\nc", 8)), "abc");
  EXPECT_EQ(plain_text("\xc2\x9b"
                       "31mC1\xc2\x85"),
            "31mC1");  // CSI as a character of its own is taken away; what follows is text then
  EXPECT_EQ(plain_text("x\u202Egnp.exe\u2066\u200F"), "xgnp.exe");
}

TEST(PlainText, BytesThatAreNoUtf8) {
  EXPECT_EQ(plain_text("a\xff\xfe"), "a��");
  EXPECT_EQ(plain_lines("\033[2Ja\r\n\nb\033[0m"), "a\n\nb");
  EXPECT_EQ(plain_text("\xc3"), "�");
  EXPECT_EQ(plain_text("\xe6\xbc"), "��");
  EXPECT_EQ(plain_text("\xc0\xaf\xed\xa0\x80"), "�����");  // too long a form of '/', half of a surrogate pair
  EXPECT_EQ(plain_text("\033["), "");
  EXPECT_EQ(plain_text("\033]never ended"), "");
  EXPECT_EQ(plain_text("\033"), "");
}

TEST(PlainText, OfAnyBytesIsCleanAndStaysAsItIs) {
  std::mt19937 random(7);
  const std::string_view pieces[] = {"\033[", "\033]", "31m",    "é",  "\xe6",     "\x80", "a",
                                     "\033",  "\a",    "\u202e", "漢", "\xf0\x9f", "\0"};
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = 0; i < 12; ++i)
      if (random() % 2) text += pieces[random() % std::size(pieces)];
      else text += static_cast<char>(random() % 256);
    const std::string plain = plain_text(text);
    EXPECT_EQ(plain_text(plain), plain);
    for (const char c : plain) EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f);
    EXPECT_NO_THROW(nlohmann::json(plain).dump());  // which refuses what is not UTF-8
  }
}

TEST(Fitted, IsExactlySoWide) {
  EXPECT_EQ(fitted("abc", 5), "abc  ");
  EXPECT_EQ(fitted("abc", 5, true), "  abc");
  EXPECT_EQ(fitted("abcdef", 5), "abcd…");
  EXPECT_EQ(fitted("漢字漢字", 6), "漢字… ");  // five columns would halve the third
  EXPECT_EQ(fitted("漢字漢字", 8), "漢字漢字");
  EXPECT_EQ(fitted("e\u0301e\u0301", 2), "e\u0301e\u0301");  // a combining accent takes no column
  EXPECT_EQ(fitted("abc", 0), "");
  EXPECT_EQ(cells("🙂漢é"), 5u);
}

// ---------------------------------------------------------------- table

Snapshot job_of(size_t ranks) {
  Snapshot s{.program = "train", .url = {}, .world_size = static_cast<int64_t>(ranks), .ranks = {}};
  for (size_t i = 0; i < ranks; ++i)
    s.ranks.push_back({.name = std::to_string(i),
                       .local_rank = static_cast<int64_t>(i),
                       .pid = 1000 + static_cast<pid_t>(i),
                       .state = "running",
                       .end = {},
                       .seconds = 3700,
                       .steps = 12,
                       .steps_per_second = 3.25,
                       .cpu_percent = 99.6,
                       .resident_bytes = 3 << 29,
                       .gpu = {},
                       .tokens = {},
                       .tokens_per_second = {},
                       .flops_per_second = {},
                       .peak_flops = {},
                       .comm_share = {},
                       .data_share = {},
                       .last_line = "loss 漢字 of a line that is long enough to be cut somewhere"});
  return s;
}

std::string without_colours(const std::string& line) { return plain_text(line); }

TEST(Table, ShowsWhatIsKnownAndLeavesOutWhatNobodyHas) {
  auto s = job_of(2);
  s.ranks[1].steps.reset(), s.ranks[1].steps_per_second.reset();
  s.ranks[1].state = "failed", s.ranks[1].end = "SIGKILL";
  const auto lines = to_lines(s, 120, 10, false);
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_THAT(lines[0], StartsWith("train, 0:00: 1 running, 1 failed"));
  EXPECT_THAT(lines[1], Not(HasSubstr("GPU")));
  EXPECT_THAT(lines[2], testing::ContainsRegex("^0 +running +1000 +1:01:40 +12 +3\\.2 +100 +1\\.5 GiB  loss 漢字"));
  EXPECT_THAT(lines[3], testing::ContainsRegex("^1 +failed SIGKILL +1001 +1:01:40 +- +- "));
  s.ranks[0].gpu = GpuUse{
      .index = 3, .name = {}, .busy_percent = 57, .used_bytes = int64_t{12} << 30, .total_bytes = int64_t{80} << 30};
  EXPECT_THAT(to_lines(s, 160, 10, false)[2], HasSubstr("3: 57 %, 12 GiB of 80 GiB"));
}

TEST(Table, LinesAreExactlyAsWideAsAsked) {
  for (const bool colours : {false, true})
    for (size_t width = 1; width < 180; ++width)
      for (const auto& line : to_lines(job_of(3), width, 5, colours))
        EXPECT_EQ(cells(without_colours(line)), width) << line;
}

TEST(Table, RanksThatDoNotFitAreSummedUpButFailuresAreShown) {
  auto s = job_of(100);
  s.ranks[77].state = "failed";
  for (size_t i = 90; i < 100; ++i) s.ranks[i].state = "done";
  for (size_t most = 0; most < 103; ++most)
    EXPECT_LE(to_lines(s, 100, most, false).size(), std::max<size_t>(most, 1)) << most;
  const auto lines = to_lines(s, 100, 6, false);
  ASSERT_EQ(lines.size(), 6u);
  EXPECT_THAT(lines[2], StartsWith("0 "));
  EXPECT_THAT(lines[3], StartsWith("1 "));
  EXPECT_THAT(lines[4], StartsWith("77 "));
  EXPECT_THAT(lines[5], StartsWith("and 97 more: 87 running, 10 done"));
  EXPECT_EQ(to_lines(s, 100, 102, false).size(), 102u);
}

/// A job that says all that can be said.
Snapshot speaking_job() {
  auto s = job_of(2);
  for (auto& rank : s.ranks) {
    rank.tokens = 123456, rank.tokens_per_second = 21400, rank.flops_per_second = 7.5e10, rank.peak_flops = 3e11;
    rank.comm_share = 0.031, rank.data_share = 0.42;
  }
  return s;
}

TEST(Table, FiguresHaveColumnsWhereThereIsRoom) {
  auto s = speaking_job();
  const auto wide = to_lines(s, 160, 10, false);
  EXPECT_THAT(wide[0], HasSubstr("2 running; 42.8k tokens/s"));
  EXPECT_THAT(wide[1], testing::ContainsRegex("memory  token/s  comm %  data %  MFU %  FLOP/s  last line"));
  EXPECT_THAT(wide[2], testing::ContainsRegex("1.5 GiB    21.4k     3.1      42     25   75.0G  loss"));
  // The columns that are there without them stay first; nothing is halved, and the last line keeps its room.
  for (size_t width = 60; width < 160; ++width) {
    const auto heads = to_lines(s, width, 10, false)[1];
    if (width >= 100) {
      EXPECT_THAT(heads, HasSubstr("last line")) << width;
    }
    for (const char* title : {"token/s", "comm %", "data %", "MFU %", "FLOP/s"})
      if (const size_t at = heads.find(std::string(title).substr(0, 4)); at != std::string::npos) {
        EXPECT_EQ(heads.substr(at, std::strlen(title)), title) << width;
      }
  }
  EXPECT_THAT(to_lines(s, 100, 10, false)[1], Not(HasSubstr("FLOP/s")));
  // Figures that nobody gives have no column.
  for (auto& rank : s.ranks) rank.data_share.reset(), rank.peak_flops.reset();
  EXPECT_THAT(to_lines(s, 160, 10, false)[1], testing::ContainsRegex("token/s  comm %  FLOP/s  last line"));
}

TEST(Table, FiguresAreInTheJson) {
  auto s = speaking_job();
  s.ranks[1].peak_flops.reset(), s.ranks[1].tokens.reset();
  const auto ranks = to_json(s)["ranks"];
  EXPECT_EQ(ranks[0]["tokens"], 123456);
  EXPECT_EQ(ranks[0]["tokens_per_second"], 21400);
  EXPECT_EQ(ranks[0]["flops_per_second"], 7.5e10);
  EXPECT_EQ(ranks[0]["peak_flops"], 3e11);
  EXPECT_EQ(ranks[0]["utilisation"], 0.25);
  EXPECT_EQ(ranks[0]["comm_share"], 0.031);
  EXPECT_EQ(ranks[0]["data_share"], 0.42);
  EXPECT_TRUE(ranks[1]["utilisation"].is_null());
  EXPECT_TRUE(ranks[1]["tokens"].is_null());
}

// ---------------------------------------------------------------- over time

nlohmann::ordered_json figure(const History& history, const std::string& name) {
  const auto json = history.json();
  for (const auto& one : json["figures"])
    if (one["name"] == name) return one;
  return {};
}

TEST(OverTime, IsLeastMeanAndMostOverTheRanks) {
  History history;
  auto s = speaking_job();
  s.seconds = 1, s.ranks[1].steps_per_second = 1.25, s.ranks[1].comm_share.reset();
  history.add(s);
  s.seconds = 2.00009, s.ranks[0].steps_per_second.reset(), s.ranks[1].steps_per_second.reset();
  history.add(s);
  using nlohmann::ordered_json;
  EXPECT_EQ(history.json()["seconds"], ordered_json({1, 2.0}));
  EXPECT_EQ(figure(history, "steps_per_second"), ordered_json({{"name", "steps_per_second"},
                                                               {"title", "steps"},
                                                               {"unit", "/s"},
                                                               {"least", {1.25, nullptr}},
                                                               {"mean", {2.25, nullptr}},
                                                               {"most", {3.25, nullptr}}}));
  EXPECT_EQ(figure(history, "comm_share")["mean"], ordered_json({3.1, 3.1}));  // of the rank that knows
  EXPECT_EQ(figure(history, "utilisation")["mean"], ordered_json({25, 25}));
  EXPECT_EQ(figure(history, "flops_per_second")["unit"], "FLOP/s");
  EXPECT_EQ(figure(history, "data_share")["most"][0], 42);
  EXPECT_EQ(figure(history, "tokens_per_second")["least"][0], 21400);
  EXPECT_EQ(figure(history, "resident_bytes")["mean"][0], 1611000000);  // four digits
  EXPECT_TRUE(figure(history, "gpu_bytes").is_null());                  // nobody has one
  s.ranks[0].gpu = GpuUse{.index = 0, .name = {}, .busy_percent = 5, .used_bytes = 1000, .total_bytes = 2000};
  history.add(s);
  EXPECT_EQ(figure(history, "gpu_bytes")["mean"], ordered_json({nullptr, nullptr, 1000}));
}

TEST(OverTime, WhatIsLoggedComesFirst) {
  History history(4);
  auto s = job_of(2);
  s.ranks[0].steps_per_second = 1;
  for (int second = 1; second <= 20; ++second) {
    s.seconds = second;
    if (second > 10) s.ranks[0].logged = {{"loss", 20.0 - second}, {"bad", NAN}};
    if (second > 10) s.ranks[1].logged = {{"loss", 22.0 - second}};
    history.add(s);
  }
  const auto json = history.json();
  EXPECT_EQ(json["figures"][0]["name"], "logged/loss");
  EXPECT_EQ(json["figures"][0]["title"], "loss");
  EXPECT_EQ(json["figures"][0]["unit"], "value");
  EXPECT_EQ(json["figures"][1]["name"], "steps_per_second");
  const auto loss = figure(history, "logged/loss");
  EXPECT_TRUE(loss["mean"][0].is_null());
  EXPECT_EQ(loss["least"].back(), 0);
  EXPECT_EQ(loss["most"].size(), json["seconds"].size());
  EXPECT_TRUE(figure(history, "logged/bad").is_null());
  // No more than there is room for.
  for (int i = 0; i < 100; ++i) {
    s.ranks[0].logged = {{"name " + std::to_string(i), 1}};
    history.add(s);
  }
  size_t names = 0;
  for (const auto& one : history.json()["figures"]) names += one["unit"] == "value";
  EXPECT_LE(names, History::kMostLogged);
}

TEST(OverTime, ALongRunTakesAsMuchAsAShortOne) {
  History history(4);
  auto s = job_of(1);
  for (int second = 1; second <= 1000; ++second) {
    s.seconds = second, s.ranks[0].cpu_percent = second;
    history.add(s);
    EXPECT_LE(history.json()["seconds"].size(), 8u);
  }
  const auto cpu = figure(history, "cpu_percent");
  const auto seconds = history.json()["seconds"];
  EXPECT_EQ(seconds.back(), 1000);
  EXPECT_EQ(cpu["least"][0], 1);
  EXPECT_EQ(cpu["most"].back(), 1000);
  // Each point is of all looks since the one before.
  for (size_t i = 0; i < seconds.size(); ++i) {
    const double first = i == 0 ? 1 : seconds[i - 1].get<double>() + 1, last = seconds[i].get<double>();
    EXPECT_EQ(cpu["least"][i], first);
    EXPECT_EQ(cpu["most"][i], last);
    EXPECT_NEAR(cpu["mean"][i].get<double>(), (first + last) / 2, 0.06);
  }
}

// ---------------------------------------------------------------- steps

constexpr uint64_t kSecond = 1'000'000'000;

TEST(Steps, RateComesFromTheTimesOfTheSteps) {
  StepCounter counter(support::scratch_dir() + "/steps");
  EXPECT_FALSE(counter.steps());
  counter.look();
  EXPECT_FALSE(counter.steps());  // zeros: no step yet
  counter.add({1, 100 * kSecond});
  EXPECT_EQ(counter.steps(), 1);
  EXPECT_FALSE(counter.per_second(101 * kSecond));  // one point has no rate
  counter.add({5, 102 * kSecond});
  EXPECT_DOUBLE_EQ(*counter.per_second(102 * kSecond), 2);
  counter.add({5, 102 * kSecond});  // nothing new
  EXPECT_DOUBLE_EQ(*counter.per_second(102 * kSecond), 2);
  // Only the last ten seconds count.
  for (uint64_t t = 103; t <= 130; ++t) counter.add({5 + 10 * (t - 102), t * kSecond});
  EXPECT_DOUBLE_EQ(*counter.per_second(130 * kSecond), 10);
  // A rank that stands still gets slower and slower.
  EXPECT_DOUBLE_EQ(*counter.per_second(135 * kSecond), 0.2);
  // It counts anew.
  counter.add({2, 140 * kSecond});
  EXPECT_EQ(counter.steps(), 2);
  EXPECT_FALSE(counter.per_second(140 * kSecond));
}

/// The fake rank writes these; names may be anything.
TEST(Steps, LoggedNumbersAreReadByName) {
  const std::string path = support::scratch_dir() + "/counted";
  StepCounter counter(path);
  counter.look();
  EXPECT_THAT(counter.logged(), testing::IsEmpty());
  std::array<LoggedRecord, kMostLogged> all{};
  all[0] = {.count = 3, .value = 0.5, .name = "loss"};
  all[2] = {.count = 1, .value = -2, .name = "\033[31mred"};
  all[3].count = 1;
  std::fill(std::begin(all[3].name), std::end(all[3].name), 'x');  // no zero behind it
  std::ofstream(path + kLoggedFile, std::ios::binary).write(reinterpret_cast<const char*>(&all), sizeof(all));
  counter.look();
  EXPECT_THAT(counter.logged(),
              ElementsAre(std::pair<std::string, double>("loss", 0.5), std::pair<std::string, double>("red", -2.0),
                          std::pair<std::string, double>(std::string(48, 'x'), 0.0)));
  // A restart begins without them; a file that is too short says nothing.
  StepCounter next(path);
  next.look();
  EXPECT_THAT(next.logged(), testing::IsEmpty());
  std::ofstream(path + kLoggedFile) << "short";
  counter.look();
  EXPECT_EQ(counter.logged().size(), 3u);
}

TEST(Steps, SlowStepsHaveARateToo) {
  StepCounter counter(support::scratch_dir() + "/slow_steps");
  counter.add({1, 100 * kSecond});
  counter.add({2, 160 * kSecond});
  counter.add({3, 220 * kSecond});
  EXPECT_DOUBLE_EQ(*counter.per_second(220 * kSecond), 1.0 / 60);
}

TEST(Steps, WhatAStepTakesComesFromTheSameSteps) {
  StepCounter counter(support::scratch_dir() + "/figures");
  counter.add(
      {.steps = 1, .at_ns = 100 * kSecond, .tokens = 500, .flops = 1e9, .comm_wait_ns = kSecond, .data_wait_ns = 1});
  EXPECT_EQ(counter.tokens(), 500);
  EXPECT_FALSE(counter.tokens_per_second(100 * kSecond) || counter.comm_share());
  counter.add({.steps = 5,
               .at_ns = 104 * kSecond,
               .tokens = 900,
               .flops = 5e9,
               .comm_wait_ns = 2 * kSecond,
               .data_wait_ns = 1 + 3 * kSecond});
  EXPECT_DOUBLE_EQ(*counter.tokens_per_second(104 * kSecond), 100);
  EXPECT_DOUBLE_EQ(*counter.flops_per_second(104 * kSecond), 1e9);
  EXPECT_DOUBLE_EQ(*counter.comm_share(), 0.25);
  EXPECT_DOUBLE_EQ(*counter.data_share(), 0.75);
  // A rank that stands still does nothing with tokens either.
  EXPECT_DOUBLE_EQ(*counter.tokens_per_second(114 * kSecond), 10);
}

TEST(Steps, WhatNobodySaysIsUnknown) {
  StepCounter counter(support::scratch_dir() + "/silent");
  counter.add({1, 100 * kSecond});
  counter.add({2, 101 * kSecond});
  EXPECT_FALSE(counter.tokens() || counter.tokens_per_second(101 * kSecond) ||
               counter.flops_per_second(101 * kSecond) || counter.comm_share() || counter.data_share());
  // A figure that counts backwards, or is no number, is neither.
  counter.add({.steps = 3, .at_ns = 102 * kSecond, .tokens = 100, .flops = 10, .comm_wait_ns = 9, .data_wait_ns = 9});
  StepCounter odd(support::scratch_dir() + "/odd_figures");
  odd.add({.steps = 1, .at_ns = 100 * kSecond, .tokens = 100, .flops = 10, .comm_wait_ns = 9, .data_wait_ns = 9});
  odd.add(
      {.steps = 2, .at_ns = 101 * kSecond, .tokens = 99, .flops = std::nan(""), .comm_wait_ns = 8, .data_wait_ns = 8});
  EXPECT_FALSE(odd.tokens_per_second(101 * kSecond) || odd.flops_per_second(101 * kSecond) || odd.comm_share() ||
               odd.data_share());
  odd.add({.steps = 3, .at_ns = 102 * kSecond, .tokens = 1, .flops = 1e308, .comm_wait_ns = ~0ull, .data_wait_ns = 1});
  EXPECT_DOUBLE_EQ(*odd.comm_share(), 1);  // nobody waits longer than it runs
}

TEST(Steps, WhateverIsInTheFile) {
  const std::string file = support::scratch_dir() + "/odd_steps";
  StepCounter counter(file);
  counter.add({~uint64_t{0}, 100 * kSecond});
  EXPECT_EQ(counter.steps(), INT64_MAX);
  ::unlink(file.c_str());
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  counter.look();  // does not wait for a writer
  EXPECT_EQ(counter.steps(), INT64_MAX);
}

// ---------------------------------------------------------------- processes

TEST(Processes, AWholeTreeIsMeasured) {
  constexpr size_t kBytes = 64 << 20;
  const auto filled = [] {
    void* memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return std::memset(memory, 1, kBytes);
  };
  auto* own_seconds = static_cast<volatile double*>(
      ::mmap(nullptr, sizeof(double), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  // A leader of a group that sleeps. A child of it in a group of its own holds memory; another process, whose parent
  // has ended, does so and computes.
  const pid_t root = ::fork();
  if (root == 0) {
    ::setpgid(0, 0);
    const pid_t middle = ::fork();
    if (middle == 0) {
      if (::fork() != 0) ::_exit(0);
      for (void* memory = filled();;) {
        std::memset(memory, 2, kBytes / 16);
        timespec used{};
        ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
        *own_seconds = static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) / 1e9;
      }
    }
    ::waitpid(middle, nullptr, 0);
    if (::fork() == 0) {
      ::setpgid(0, 0);
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      filled();
    }
    for (;;) ::pause();
  }
  ::setpgid(root, root);
  ProcessTrees trees;
  std::optional<ProcessUse> use;
  // Seconds of CPU, from the eighth look on: all processes are known by then. The process's own figures before and
  // after a look are less and more than what the look finds.
  double measured = 0, begin_at_least = 0, begin_at_most = 0, end_at_least = 0;
  auto before = ProcessTrees::Clock::now();
  for (int i = 0; i < 40; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    end_at_least = *own_seconds;
    const auto now = ProcessTrees::Clock::now();
    use = trees.look({root, -1}, now)[0];
    ASSERT_TRUE(use);
    if (i == 7) begin_at_least = end_at_least, begin_at_most = *own_seconds;
    if (i > 7) measured += *use->cpu_percent / 100 * std::chrono::duration<double>(now - before).count();
    before = now;
  }
  const double end_at_most = *own_seconds;
  EXPECT_GT(use->resident_bytes, static_cast<int64_t>(2 * kBytes));
  // The kernel counts in hundredths of a second, and we in halves of a memset.
  constexpr double kRounding = 0.1;
  EXPECT_GT(measured, end_at_least - begin_at_most - kRounding);
  EXPECT_LT(measured, end_at_most - begin_at_least + kRounding);
  EXPECT_FALSE(trees.look({root, -1})[1]);
  ::kill(-root, SIGKILL);
  ::waitpid(root, nullptr, 0);
  EXPECT_FALSE(trees.look({root, -1})[0]);
}

TEST(Gpus, FollowTheVisibleDevices) {
  EXPECT_THAT(gpu_names("", 2), ElementsAre("0", "1"));
  EXPECT_THAT(gpu_names("3,GPU-abc", 3), ElementsAre("3", "GPU-abc", ""));
}

TEST(Gpus, PeaksAreThoseOfKnownNames) {
  const auto peak = [](const char* name, std::optional<int64_t> busy = 1) {
    return peak_flops_of({.index = 0, .name = name, .busy_percent = busy, .used_bytes = 0, .total_bytes = 0})
        .value_or(0);
  };
  EXPECT_EQ(peak("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(peak("NVIDIA H100 80GB HBM3"), 989e12);
  EXPECT_EQ(peak("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(peak("NVIDIA H200"), 989e12);
  EXPECT_EQ(peak("Tesla V100-SXM2-16GB"), 125e12);
  EXPECT_EQ(peak("NVIDIA L40S"), 362e12);
  EXPECT_EQ(peak("NVIDIA L4"), 121e12);
  EXPECT_EQ(peak("NVIDIA L40"), 0);  // not an L4
  EXPECT_EQ(peak("NVIDIA A3000"), 0);
  EXPECT_EQ(peak(""), 0);
  EXPECT_EQ(peak("NVIDIA A100-SXM4-80GB", std::nullopt), 0);  // a part of one
}

// ---------------------------------------------------------------- HTTP

std::string answer(const std::string& request, const std::string& own_name = "127.0.0.1") {
  return respond(request, own_name,
                 {.state = [] { return std::string("{\"a\": 1}"); }, .history = [] { return std::string("[]"); }});
}
std::string get(const std::string& target, const std::string& host = "127.0.0.1:80") {
  return "GET " + target + " HTTP/1.1\r\nHost: " + host + "\r\n";
}

TEST(Http, AnswersTwoAddresses) {
  const auto page = answer(get("/"));
  EXPECT_THAT(page, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(page, HasSubstr("Content-Security-Policy: default-src 'none'; script-src 'nonce-"));
  EXPECT_THAT(page, Not(HasSubstr("NONCE")));
  EXPECT_THAT(page, Not(HasSubstr("unsafe")));
  EXPECT_NE(page.substr(page.find("nonce-"), 38),
            answer(get("/")).substr(page.find("nonce-"), 38));  // another one each time
  const auto state = answer(get("/state.json?x=1"));
  EXPECT_THAT(state, HasSubstr("Content-Type: application/json"));
  EXPECT_THAT(state, HasSubstr("Content-Length: 8\r\n"));
  EXPECT_THAT(state, testing::EndsWith("\r\n\r\n{\"a\": 1}"));
  EXPECT_THAT(answer(get("/history.json")), testing::EndsWith("\r\n\r\n[]"));
  EXPECT_THAT(answer("HEAD /state.json HTTP/1.1\r\nHost: localhost\r\n"), testing::EndsWith("\r\n\r\n"));
  EXPECT_THAT(answer(get("/etc/passwd")), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(answer("POST / HTTP/1.1\r\nHost: localhost\r\n"),
              testing::AllOf(StartsWith("HTTP/1.1 405 "), HasSubstr("Allow: GET, HEAD")));
}

/// A connection to the page on this machine, which does not block once it is there.
struct Client {
  explicit Client(const std::string& url) : fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(std::stoi(url.substr(url.rfind(':') + 1))));
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    ::fcntl(fd.get(), F_SETFL, O_NONBLOCK);
  }
  void say(const std::string& text) const { ::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL); }
  std::string heard() const {
    char bytes[4096];
    const ssize_t got = ::recv(fd.get(), bytes, sizeof(bytes), 0);
    return got > 0 ? std::string(bytes, static_cast<size_t>(got)) : "";
  }
  Fd fd;
};

// Clients that hold all places and say nothing, or little, do not keep others out: no waiting until they are shown the
// door.
TEST(Http, SlowConnectionsGiveWay) {
  WebPage page("127.0.0.1", 0);
  const WebPage::Data data{.state = [] { return std::string("{}"); }, .history = [] { return std::string("[]"); }};
  const auto serve = [&] {
    std::vector<pollfd> fds;
    page.add_to(fds);
    ::poll(fds.data(), fds.size(), 10);
    page.serve(fds, data);
  };
  std::vector<std::unique_ptr<Client>> slow;
  for (int i = 0; i < 200; ++i) {
    slow.push_back(std::make_unique<Client>(page.url()));
    if (i % 2 == 0) slow.back()->say("GET /state.json HTTP/1.1\r\n");
    serve();
  }
  const Client good(page.url());
  good.say(get("/state.json") + "\r\n");
  std::string heard;
  for (int passes = 0; passes < 20 && heard.empty(); ++passes) {
    serve();
    heard = good.heard();
  }
  EXPECT_THAT(heard, StartsWith("HTTP/1.1 200 "));
}

TEST(Http, OnlyUnderThisMachinesNames) {
  char machine[256] = "";
  ::gethostname(machine, sizeof(machine) - 1);
  for (const auto& host : std::vector<std::string>{"127.0.0.1", "127.0.0.1:8000", "localhost:8000", "LOCALHOST",
                                                   "[::1]:8000", "10.1.2.3:80", "node7:80", machine})
    EXPECT_THAT(answer(get("/state.json", host), "node7"), StartsWith("HTTP/1.1 200 ")) << host;
  for (const std::string host :
       {"evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", ":80", "[::1",
        "[evil.example]", "127.0.0.1@evil.example"})
    EXPECT_THAT(answer(get("/state.json", host), "node7"), StartsWith("HTTP/1.1 403 ")) << host;
  // C's functions would look at the part before the NUL only.
  EXPECT_THAT(answer(get("/state.json", std::string("127.0.0.1\0.evil.example", 23)), "node7"),
              StartsWith("HTTP/1.1 403 "));
  EXPECT_THAT(answer("GET / HTTP/1.1\r\n"), StartsWith("HTTP/1.1 400 "));
  EXPECT_THAT(answer("GET / HTTP/1.1\r\nHost: localhost\r\nhost: evil.example\r\n"), StartsWith("HTTP/1.1 400 "));
}

TEST(Http, WhatIsNoRequest) {
  for (const std::string text :
       {"", "\r\n", "GET\r\n", "GET /\r\n", "GET / SPDY/3\r\n", "\x16\x03\x01\r\n", "GET  HTTP\r\n"})
    EXPECT_THAT(answer(text), StartsWith("HTTP/1.1 400 ")) << text;
}

TEST(Http, AnyBytesAreAnswered) {
  std::mt19937 random(11);
  const std::string_view pieces[] = {"GET ", "/", " HTTP/1.1", "\r\n", "Host:", "localhost", " ", ":", "[", "]", "?"};
  for (int round = 0; round < 5000; ++round) {
    std::string text;
    for (int i = 0; i < 14; ++i)
      if (random() % 4) text += pieces[random() % std::size(pieces)];
      else text += static_cast<char>(random() % 256);
    EXPECT_THAT(answer(text), StartsWith("HTTP/1.1 "));
  }
}

}  // namespace
