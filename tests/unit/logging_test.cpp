// Loggers, their levels, the sink, and how the default one writes; with several ranks who speaks, and in which order.
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <accelerate/logging.hpp>

#include <nlohmann/json.hpp>
#include <regex>
#include <thread>

#include "accelerate/accelerator/dry_run.hpp"
#include "accelerate/comm.hpp"
#include "accelerate/state.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "ranks.hpp"
#include "utils/log.hpp"

using namespace accelerate;

namespace {

using support::message_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::MatchesRegex;
using testing::StartsWith;

/// The lines that are logged from now on, as "LEVEL logger: message".
class Heard {
 public:
  Heard()
      : before_(set_log_sink([this](const LogRecord& record) {
          all.push_back(std::string(to_string(record.level)) + " " + record.logger + ": " + record.message);
        })) {}
  ~Heard() { set_log_sink(before_); }
  std::vector<std::string> all;

 private:
  LogSink before_;
};

/// Standard error on a pipe in which each write(2) is a packet of its own, which one read(2) gives back.
class Packets {
 public:
  Packets() : before_(::dup(STDERR_FILENO)) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_DIRECT | O_NONBLOCK | O_CLOEXEC), 0);
    ::dup2(ends[1], STDERR_FILENO), ::close(ends[1]);
    read_ = ends[0];
  }
  ~Packets() {
    ::dup2(before_, STDERR_FILENO);
    ::close(before_), ::close(read_);
  }
  std::string next() const {
    char bytes[8192];
    const ssize_t got = ::read(read_, bytes, sizeof(bytes));
    return {bytes, static_cast<size_t>(std::max<ssize_t>(got, 0))};
  }

 private:
  int before_, read_ = -1;
};

TEST(Logging, NeedsToKnowWhoThisProcessIs) {
  const auto logger = get_logger("early");
  EXPECT_THAT(message_of<ConfigError>([&] { logger.warning("x"); }), HasSubstr("PartialState"));
  EXPECT_THAT(message_of<ConfigError>([&] { logger.warning_once("x"); }), HasSubstr("PartialState"));
  const PartialState state;
  const Heard heard;
  logger.warning_once("x");
  EXPECT_THAT(heard.all, ElementsAre("WARNING early: x"));
}

TEST(Logging, LevelsArePythons) {
  const PartialState state;
  const Heard heard;
  const auto logger = get_logger("levels");
  const auto all = [&] {
    logger.debug("d"), logger.info("i"), logger.warning("w"), logger.error("e"), logger.critical("c");
  };
  all();
  EXPECT_THAT(heard.all, ElementsAre("WARNING levels: w", "ERROR levels: e", "CRITICAL levels: c"));
  EXPECT_FALSE(logger.is_enabled_for(LogLevel::info));
  logger.set_level("debug");
  EXPECT_TRUE(logger.is_enabled_for("DEBUG"));
  all();
  EXPECT_THAT(heard.all, testing::SizeIs(8));
  logger.set_level(LogLevel::critical);
  all();
  EXPECT_THAT(heard.all, testing::SizeIs(9));
  EXPECT_THAT(message_of<ConfigError>([&] { logger.set_level("LOUD"); }),
              AllOf(HasSubstr("'LOUD'"), HasSubstr("CRITICAL")));
  EXPECT_THAT(message_of<ConfigError>([] { get_logger("x", "LOUD"); }), HasSubstr("'LOUD'"));
}

TEST(Logging, LevelsGoDownTheDottedNames) {
  const PartialState state;
  const auto parent = get_logger("family");
  const auto child = get_logger("family.child");
  const auto namesake = get_logger("familyx");
  parent.set_level("INFO");
  EXPECT_TRUE(child.is_enabled_for(LogLevel::info));
  EXPECT_FALSE(namesake.is_enabled_for(LogLevel::info));
  child.set_level("ERROR");
  EXPECT_FALSE(child.is_enabled_for(LogLevel::warning));
  EXPECT_TRUE(parent.is_enabled_for(LogLevel::info));
  child.set_level("NOTSET");
  EXPECT_TRUE(child.is_enabled_for(LogLevel::info));
}

// As in the reference: a level that is asked for with a logger is that of all others, too.
TEST(Logging, ALevelOfGetLoggerIsTheRootsToo) {
  const PartialState state;
  const auto other = get_logger("other");
  EXPECT_FALSE(other.is_enabled_for(LogLevel::debug));
  get_logger("asking", "DEBUG");
  EXPECT_TRUE(other.is_enabled_for(LogLevel::debug));
}

TEST(Logging, TheEnvironmentSaysTheLevel) {
  ::setenv("ACCELERATE_LOG_LEVEL", "error", 1);
  const PartialState state;
  const Heard heard;
  logs::warn("accelerate.test", "of the library's own");  // nobody has called get_logger()
  EXPECT_THAT(heard.all, IsEmpty());
  EXPECT_FALSE(get_logger("a").is_enabled_for(LogLevel::warning));
  EXPECT_TRUE(get_logger("b", "INFO").is_enabled_for(LogLevel::info));
  ::setenv("ACCELERATE_LOG_LEVEL", "LOUD", 1);
  EXPECT_THAT(message_of<ConfigError>([] { get_logger("c"); }), HasSubstr("ACCELERATE_LOG_LEVEL"));
  PartialState::reset();
  EXPECT_THROW(PartialState(), ConfigError);
}

TEST(Logging, OnceIsOnceForEachLoggerAndText) {
  const PartialState state;
  const Heard heard;
  for (int i = 0; i < 3; ++i) {
    get_logger("once").warning_once("this");
    get_logger("once").warning_once("that");
    get_logger("once2").warning_once("this");
  }
  EXPECT_THAT(heard.all, ElementsAre("WARNING once: this", "WARNING once: that", "WARNING once2: this"));
}

TEST(Logging, ASinkTakesTheDefaultOnesPlaceUntilItGoes) {
  const PartialState state;
  const Packets packets;
  {
    const Heard heard;
    get_logger("sink").warning("heard");
    EXPECT_EQ(packets.next(), "");
  }
  get_logger("sink").warning("written");
  EXPECT_THAT(packets.next(), HasSubstr("written"));
}

TEST(Logging, ASinkThatThrowsLosesNothing) {
  const PartialState state;
  const Packets packets;
  set_log_sink([](const LogRecord&) { throw std::runtime_error("the collector is gone"); });
  get_logger("sink").warning("not lost");
  EXPECT_THAT(packets.next(), HasSubstr("not lost"));
}

TEST(Logging, WarningsOfLibTorchAndOfTheLibraryGoTheSameWay) {
  const PartialState state;
  const Heard heard;
  TORCH_WARN("of LibTorch ", 1);
  logs::warn("accelerate.test", "of the library {}", 2);
  EXPECT_THAT(heard.all, ElementsAre("WARNING torch: of LibTorch 1", "WARNING accelerate.test: of the library 2"));
}

TEST(Logging, AProgramsOwnHandlerOfWarningsStays) {
  struct Own : c10::WarningHandler {
    void process(const c10::Warning&) override { ++count; }
    int count = 0;
  } own;
  const c10::WarningUtils::WarningHandlerGuard guard(&own);
  const PartialState state;
  const Heard heard;
  TORCH_WARN("x");
  EXPECT_EQ(own.count, 1);
  EXPECT_THAT(heard.all, IsEmpty());
}

TEST(Logging, ARecordIsOneWrite) {
  const PartialState state;
  const Packets packets;
  const std::string text = std::string(1500, 'a') + "\n" + std::string(1500, 'b');
  get_logger("one").warning(text);
  get_logger("one").error("next");
  EXPECT_THAT(packets.next(), MatchesRegex("[0-9/]{10} [0-9:]{8} - WARNING - one - a{1500}\nb{1500}\n"));
  EXPECT_THAT(packets.next(), MatchesRegex("[0-9/]{10} [0-9:]{8} - ERROR - one - next\n"));
}

TEST(Logging, TheRankIsSaidWhenAskedFor) {
  ::setenv("ACCELERATE_LOG_RANK", "1", 1);
  const PartialState state;
  const Packets packets;
  get_logger("who").warning("me");
  EXPECT_THAT(packets.next(), HasSubstr(" - who - [RANK 0] me\n"));
  ::setenv("ACCELERATE_LOG_RANK", "perhaps", 1);
  EXPECT_THAT(message_of<ConfigError>([] { get_logger("x"); }), HasSubstr("ACCELERATE_LOG_RANK"));
}

// A dry run is another rank, as long as it lasts.
TEST(Logging, TheRankIsThatOfTheState) {
  int64_t rank = -1;
  set_log_sink([&](const LogRecord& record) { rank = record.rank; });
  dry_run({.num_processes = 4, .process_index = 3}, [](const DryRunMark&) {
    const PartialState state;
    get_logger("r").warning("x", {.main_process_only = false});
  });
  EXPECT_EQ(rank, 3);
  ::setenv("RANK", "2", 1);
  logs::warn("accelerate.test", "before there is a state");
  EXPECT_EQ(rank, 2);
}

TEST(Logging, JsonIsALineForEachRecord) {
  ::setenv("ACCELERATE_LOG_FORMAT", "json", 1);
  const PartialState state;
  const Packets packets;
  get_logger("j").warning("two\nlines, \"quotes\" and \xff");
  const std::string line = packets.next();
  EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1);
  const auto json = nlohmann::json::parse(line);
  EXPECT_THAT(json["time"].get<std::string>(), MatchesRegex("20[0-9]{2}-[0-9-]{5}T[0-9:]{8}\\.[0-9]{6}Z"));
  EXPECT_EQ(json["level"], "WARNING");
  EXPECT_EQ(json["logger"], "j");
  EXPECT_EQ(json["rank"], 0);
  EXPECT_EQ(json["message"], "two\nlines, \"quotes\" and \uFFFD");
  ::setenv("ACCELERATE_LOG_FORMAT", "xml", 1);
  EXPECT_THAT(message_of<ConfigError>([] { get_logger("x"); }), HasSubstr("'xml'"));
}

TEST(Logging, ThreadsDoNotMix) {
  const PartialState state;
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const int before = ::dup(STDERR_FILENO);
  ::dup2(ends[1], STDERR_FILENO), ::close(ends[1]);
  std::string text;
  std::thread reader([&] {
    char bytes[4096];
    for (ssize_t got; (got = ::read(ends[0], bytes, sizeof(bytes))) > 0;) text.append(bytes, static_cast<size_t>(got));
  });
  std::vector<std::thread> writers;
  for (const char letter : {'a', 'b', 'c', 'd'})
    writers.emplace_back([letter] {
      for (int i = 0; i < 500; ++i) get_logger("t").warning(std::string(300, letter));
    });
  for (auto& writer : writers) writer.join();
  ::dup2(before, STDERR_FILENO), ::close(before);
  reader.join();
  ::close(ends[0]);
  const std::regex whole("[0-9/]{10} [0-9:]{8} - WARNING - t - (a{300}|b{300}|c{300}|d{300})");
  std::istringstream lines(text);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) ASSERT_TRUE(std::regex_match(line, whole)) << line;
  EXPECT_EQ(count, 2000);
}

/// As logging_peer.py.
std::string said_in(const std::string& level, const std::string& environment, const std::string& own,
                    const std::string& other) {
  const std::string name = level + "," + environment + "," + own + "," + other;
  std::string said = name + "\n";
  logs::reset();
  ::unsetenv("ACCELERATE_LOG_LEVEL");
  if (environment != "-") ::setenv("ACCELERATE_LOG_LEVEL", environment.c_str(), 1);
  set_log_sink([&](const LogRecord& record) {
    said += std::string(to_string(record.level)) + " " + record.logger + " " + record.message + "\n";
  });
  const auto ask = [](const std::string& logger, const std::string& wanted) {
    return get_logger(logger, wanted == "-" ? std::nullopt : std::optional(wanted));
  };
  const std::vector loggers{ask("other", other), ask("a.b", level)};
  if (own != "-") logs::set_level("a", log_level_from_string(own));
  for (const auto& logger : loggers) {
    logger.debug("d"), logger.info("i"), logger.warning("w"), logger.error("e"), logger.critical("c");
    for (int i = 0; i < 2; ++i) logger.warning_once(name);
  }
  set_log_sink({});
  return said;
}

TEST(Logging, SaysWhatTheReferenceSays) {
  SKIP_WITHOUT_PYTHON();
  const PartialState state;
  std::vector<std::string> cases;
  std::string said;
  for (const char* level : {"-", "DEBUG", "error"})
    for (const char* environment : {"-", "info"})
      for (const char* own : {"-", "ERROR", "INFO"})
        for (const char* other : {"-", "DEBUG", "error"}) {
          const std::string of_case = said_in(level, environment, own, other);
          cases.push_back(of_case.substr(0, of_case.find('\n')));
          said += of_case;
        }
  const auto python = support::run_python("tests/unit/logging_peer.py", cases);
  EXPECT_EQ(python.exit_code, 0);
  EXPECT_EQ(said, python.output);
}

// ---------------------------------------------------------------- several ranks

RANKS_TEST(LoggingRanks, OnlyTheMainProcessSpeaksUnlessAllShall, 3) {
  const PartialState state;
  const Heard heard;
  const auto logger = get_logger("ranks");
  logger.warning("main");
  logger.warning("all", {.main_process_only = false});
  if (state.is_main_process()) EXPECT_THAT(heard.all, ElementsAre("WARNING ranks: main", "WARNING ranks: all"));
  else EXPECT_THAT(heard.all, ElementsAre("WARNING ranks: all"));
}

RANKS_TEST(LoggingRanks, InOrderEachSpeaksAfterTheOneBefore, 3) {
  const PartialState state;
  std::vector<int64_t> spoken;  // when, as a number that grows for all
  const auto clock = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
  set_log_sink([&](const LogRecord& record) {
    EXPECT_EQ(record.rank, state.process_index());
    // The last ranks would be first if nobody waited.
    std::this_thread::sleep_for(std::chrono::milliseconds(20 * (state.num_processes() - state.process_index())));
    spoken.push_back(clock());
  });
  const auto logger = get_logger("ranks");
  // A rank whose level leaves it silent takes part.
  if (state.process_index() == 1) logger.set_level("ERROR");
  logger.warning("silence of one", {.in_order = true});
  logger.error("all", {.main_process_only = true, .in_order = true});
  EXPECT_EQ(spoken.size(), state.process_index() == 1 ? 1u : 2u);
  const auto all = gather_object(std::vector<int64_t>{spoken.back()});
  EXPECT_TRUE(std::is_sorted(all.begin(), all.end()));
}

TEST(LoggingRanks, InOrderEndsWhenARankHasFailed) {
  if (support::is_rank()) {
    const PartialState state;
    if (state.process_index() == 1) ::_exit(3);
    get_logger("ranks").warning("x", {.in_order = true});
    return;
  }
  const auto results = support::run_test_in_ranks("LoggingRanks.InOrderEndsWhenARankHasFailed", {.world_size = 2});
  EXPECT_EQ(results[0].exit_code, 1);
  EXPECT_THAT(results[0].output, HasSubstr("rank 1"));
}

}  // namespace
