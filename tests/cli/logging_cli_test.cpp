// Lines that ranks log, through the real launcher; and asking it what ranks do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <thread>

#include "program.hpp"

namespace {

using namespace cli_test;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

std::vector<std::string> launching(std::vector<std::string> options, const std::string& what) {
  options.insert(options.begin(), {accelerate_path(), "launch", "--cpu"});
  options.insert(options.end(), {std::string(ACCELERATE_BIN_DIR) + "/log_rank", what});
  return options;
}

/// Without the launcher's own.
std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);)
    if (!line.starts_with("accelerate launch: ")) lines.push_back(line);
  return lines;
}

TEST(LoggingLaunched, InOrderIsTheOrderAtTheEndOfTheLauncher) {
  Program program(launching({"--num_processes", "3"}, "in_order"));
  ASSERT_TRUE(program.wait_for("round 3 of rank 0"));
  program.signal(SIGSTOP);  // what ranks say meanwhile waits in a pipe of each
  std::this_thread::sleep_for(milliseconds(150));
  program.signal(SIGCONT);
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto lines = lines_of(result.err);
  ASSERT_EQ(lines.size(), 150u) << result.err;
  for (size_t i = 0; i < lines.size(); ++i)
    EXPECT_THAT(lines[i],
                HasSubstr("INFO - job - round " + std::to_string(i / 3) + " of rank " + std::to_string(i % 3)));
}

TEST(LoggingLaunched, RecordsOfRanksDoNotMix) {
  Program program(launching({"--num_processes", "2"}, "flood"));
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::regex whole("[0-9/]{10} [0-9:]{8} - INFO - job - (0{1000}|1{1000})");
  const auto lines = lines_of(result.err);
  EXPECT_EQ(lines.size(), 1000u);
  for (const auto& line : lines) ASSERT_TRUE(std::regex_match(line, whole)) << line;
}

TEST(LoggingLaunched, JsonStaysJson) {
  Program program(launching({"--num_processes", "2"}, "in_order"), {.env = {"ACCELERATE_LOG_FORMAT=json"}});
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const auto lines = lines_of(result.err);
  ASSERT_EQ(lines.size(), 100u);
  for (size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(nlohmann::json::parse(lines[i])["rank"], i % 2) << lines[i];
}

// Nothing runs in a process that is killed, so what its C library has kept back is gone.
TEST(OutputLaunched, IsNotLostByAKill) {
  for (const std::string when : {"killed_early", "killed_late"}) {
    Program program(launching({"-q", "--num_processes", "1"}, when));
    const auto result = program.wait();
    EXPECT_EQ(result.exit_code, 128 + SIGKILL) << result.err;
    EXPECT_EQ(result.out, std::string("by printf\nby cout ") + (when == "killed_early" ? "1\n" : "2\n")) << when;
  }
  const auto ranks = Program(launching({"-q", "--num_processes", "2"}, "killed_early")).wait();
  EXPECT_THAT(ranks.out, HasSubstr("by printf\n"));
  EXPECT_THAT(ranks.out, HasSubstr("by cout 1\n"));
}

void expect_reports(const std::string& text) {
  EXPECT_THAT(text, AllOf(ContainsRegex("rank 0: group of all 2 ranks: collective [0-9]+ \\([a-z_]+\\), inside since "),
                          ContainsRegex("rank 1: group of all 2 ranks: collective [0-9]+ \\([a-z_]+\\), ended, and"),
                          ContainsRegex("rank 0: +#[0-9]+ accelerate::comm::Group::all_gather"),
                          ContainsRegex("rank 1: +#[0-9]+ busy_with_something_else")));
}

TEST(HangReportLaunched, TheLauncherPassesTheQuestionOn) {
  Program program(launching({"--num_processes", "2"}, "hang"));
  ASSERT_TRUE(program.wait_for("rank 1 begins"));
  program.read_for(milliseconds(300));
  program.signal(SIGUSR2);
  EXPECT_TRUE(program.wait_for("rank 0: stacks of process"));
  EXPECT_TRUE(program.wait_for("rank 1: stacks of process"));
  program.read_for(milliseconds(1000));
  expect_reports(program.errors());
  program.signal(SIGTERM);
  EXPECT_EQ(program.wait().exit_code, 143);  // they were alive
}

// It has the terminal, and no group of its own.
TEST(HangReportLaunched, ASingleRankOnTheTerminalAnswersToo) {
  Program program(launching({"--num_processes", "1"}, "hang"), {.terminal = true, .rows = 50, .columns = 200});
  ASSERT_TRUE(program.wait_for("rank 0 begins"));
  program.read_for(milliseconds(200));
  program.signal(SIGUSR2);
  EXPECT_TRUE(program.wait_for("busy_with_something_else"));
  program.signal(SIGTERM);
  EXPECT_EQ(program.wait().exit_code, 143);
}

// A shell that starts a rank, and ranks that are no programs of this library, would die of the signal.
TEST(HangReportLaunched, WhatHasNoHandlerIsSpared) {
  Program program({accelerate_path(), "launch", "--cpu", "--num_processes", "2", "--no_python", "sh", "-c",
                   "echo ready; sleep 1; echo alive"});
  ASSERT_TRUE(program.wait_for("ready\nready"));
  program.signal(SIGUSR2);
  const auto result = program.wait();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_THAT(result.out, HasSubstr("alive\nalive"));
  EXPECT_THAT(result.err, ContainsRegex("not passed on to rank 0 \\(process [0-9]+\\), 1 \\(process [0-9]+\\), which"));
}

TEST(HangReportLaunched, AKeyOfTheMonitorAsks) {
  Program program(launching({"--num_processes", "2", "--monitor", "--monitor_seconds", "0.1"}, "hang"),
                  {.env = {"TERM=xterm"}, .terminal = true, .rows = 50, .columns = 200});
  ASSERT_TRUE(program.wait_for("rank 1 begins"));
  program.read_for(milliseconds(500));
  program.type("xyz");  // other keys do nothing, and are not shown
  program.read_for(milliseconds(300));
  EXPECT_THAT(program.output(), AllOf(Not(HasSubstr("stacks of")), Not(HasSubstr("xyz"))));
  program.type("h");
  EXPECT_TRUE(program.wait_for("rank 0: stacks of process"));
  EXPECT_TRUE(program.wait_for("rank 1: stacks of process"));
  program.read_for(milliseconds(1000));
  expect_reports(program.output());
  EXPECT_FALSE(program.shows_what_is_typed());
  program.type("\003");
  EXPECT_EQ(program.wait().exit_code, 130);
}

TEST(HangReportLaunched, TheTerminalIsGivenBack) {
  for (const int signal : {SIGINT, SIGKILL}) {
    Program program({accelerate_path(), "launch", "--cpu", "--num_processes", "2", "--monitor", "--monitor_seconds",
                     "0.1", "--no_python", "sleep", "60"},
                    {.env = {"TERM=xterm"}, .terminal = true, .rows = 50, .columns = 200});
    ASSERT_TRUE(program.wait_for("starting"));
    for (int i = 0; i < 3000 && program.shows_what_is_typed(); ++i) program.read_for(milliseconds(20));
    EXPECT_FALSE(program.shows_what_is_typed());
    program.signal(signal);
    for (int i = 0; i < 3000 && !program.shows_what_is_typed(); ++i) program.read_for(milliseconds(20));
    EXPECT_TRUE(program.shows_what_is_typed()) << signal;
    program.wait();
  }
}

}  // namespace
