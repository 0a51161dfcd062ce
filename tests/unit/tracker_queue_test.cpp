// Queues between a training and its trackers, which never hold it, and files for what trackers don't take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "python.hpp"
#include "scratch.hpp"
#include "stubborn_tracker.hpp"
#include "trackers/json_lines.hpp"
#include "trackers/queued_tracker.hpp"
#include "variable.hpp"

using namespace accelerate;
using support::StubbornTracker;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// A StubbornTracker behind a queue, and what becomes of what is logged.
struct Queued {
  explicit Queued(
      const std::function<void(StubbornTracker&)>& change = [](auto&) {}, TrackerQueue::Limits limits = {}) {
    change(*tracker);
    queued.emplace(tracker, RecordSpillFile::Options{"stubborn", "run", path}, limits);
  }
  void log(int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) queued->log({{"i", i}}, i);
  }
  /// The steps that are in the file.
  std::vector<int64_t> spilled() const {
    MemoryTracker read;
    if (std::filesystem::exists(path))
      read_json_lines(path, [&](const JsonLine& line) {
        if (line.record) line.record->write(read, line.log_kwargs);
      });
    return steps(read);
  }
  static std::vector<int64_t> steps(const MemoryTracker& tracker) {
    std::vector<int64_t> all;
    for (const auto& row : tracker.rows) all.push_back(row.step.value_or(-1));
    return all;
  }

  const std::filesystem::path path = support::scratch("unsent/run.jsonl");
  const std::shared_ptr<StubbornTracker> tracker = std::make_shared<StubbornTracker>();
  std::optional<QueuedTracker> queued;
};

std::vector<int64_t> range(int64_t from, int64_t to) {
  std::vector<int64_t> all;
  for (int64_t i = from; i < to; ++i) all.push_back(i);
  return all;
}

template <class F> std::string said(F&& f) {
  testing::internal::CaptureStderr();
  f();
  return testing::internal::GetCapturedStderr();
}

size_t times(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

}  // namespace

TEST(TrackerQueue, AllComesInOrderAndTheEndIsTheLastThing) {
  Queued run;
  run.log(0, 1000);
  run.queued->finish();
  EXPECT_EQ(Queued::steps(*run.tracker), range(0, 1000));
  EXPECT_TRUE(run.tracker->finished);
  EXPECT_FALSE(std::filesystem::exists(run.path));
  EXPECT_THROW(run.queued->log({{"late", 1}}, 1), ConfigError);
}

TEST(TrackerQueue, WhatIsLoggedIsFlushedWithoutBeingAsked) {
  Queued run;
  run.log(0, 1);
  const auto until = Clock::now() + std::chrono::seconds(60);
  while (run.tracker->flushes == 0 && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
  EXPECT_GE(run.tracker->flushes, 1);
}

TEST(TrackerQueue, AFlushWaitsForWhatIsThereAndNotForMore) {
  Queued run([](auto&) {}, {.delay = std::chrono::hours(1)});
  run.log(0, 10);
  run.queued->flush();
  EXPECT_EQ(run.tracker->rows.size(), 10u);
  EXPECT_GE(run.tracker->flushes, 1);
}

TEST(TrackerQueue, OneThatHangsHoldsNobodyAndWhatHasNoRoomGoesToAFile) {
  const auto text = said([] {
    Queued run([](auto& tracker) { tracker.holds = true; }, {.records = 10});
    run.log(0, 1);
    while (!run.tracker->inside) std::this_thread::sleep_for(milliseconds(1));
    run.log(1, 100);
    run.tracker->holds = false;  // not before
    run.queued->finish();
    EXPECT_EQ(Queued::steps(*run.tracker), range(0, 10));
    EXPECT_EQ(run.spilled(), range(10, 100));
  });
  EXPECT_THAT(text, HasSubstr("it does not keep up"));
  EXPECT_THAT(text, HasSubstr("unsent/run.jsonl --to stubborn"));
  EXPECT_EQ(times(text, "does not take all"), 1u) << text;
}

TEST(TrackerQueue, AHundredThousandAtOnceFit) {
  Queued run([](auto& tracker) { tracker.holds = true; });
  run.log(0, 100000);
  run.tracker->holds = false;
  run.queued->finish();
  EXPECT_EQ(run.tracker->rows.size(), 100000u);
  EXPECT_FALSE(std::filesystem::exists(run.path));
}

TEST(TrackerQueue, BytesAreBoundedToo) {
  said([] {
    Queued run([](auto& tracker) { tracker.holds = true; }, {.bytes = 10000});
    for (int64_t i = 0; i < 5; ++i) run.queued->log({{"text", std::string(4000, 'x')}}, i);
    run.tracker->holds = false;
    run.queued->finish();
    EXPECT_EQ(Queued::steps(*run.tracker), range(0, 2));
    EXPECT_EQ(run.spilled(), range(2, 5));
  });
}

TEST(TrackerQueue, ARecordThatIsNotTakenGoesToTheFileAndTheOthersGoOn) {
  const auto text = said([] {
    Queued run([](auto& tracker) { tracker.refuses = "bad"; });
    run.log(0, 1);
    for (int64_t i = 1; i < 3; ++i) run.queued->log({{"bad", true}}, i, {{"colour", "red"}});
    run.log(3, 4);
    run.queued->finish();
    EXPECT_THAT(Queued::steps(*run.tracker), ElementsAre(0, 3));
    EXPECT_THAT(run.spilled(), ElementsAre(1, 2));
  });
  EXPECT_THAT(text, HasSubstr("it does not like bad"));
  EXPECT_EQ(times(text, "\n"), 1u) << text;
}

TEST(TrackerQueue, AfterATrackerIsGoneAllGoesToTheFile) {
  const auto text = said([] {
    Queued run([](auto& tracker) { tracker.goes_at = "death"; });
    run.log(0, 1);
    run.queued->flush();
    run.log(1, 2);
    run.queued->log({{"death", 1}}, 2);
    run.log(3, 5);
    run.queued->finish();
    EXPECT_THAT(Queued::steps(*run.tracker), ElementsAre(0, 1));
    EXPECT_THAT(run.spilled(), ElementsAre(1, 2, 3, 4)) << "what it had not flushed died with it";
    EXPECT_FALSE(run.tracker->finished) << "nobody is there to be told";
  });
  EXPECT_THAT(text, HasSubstr("its program has died"));
  EXPECT_EQ(times(text, "\n"), 1u) << text;
}

TEST(TrackerQueue, WhatIsNotFlushedIsNotTaken) {
  const auto text = said([] {
    Queued run([](auto& tracker) { tracker.flush_fails = true; });
    run.log(0, 3);
    run.queued->flush();
    run.log(3, 5);
    run.queued->finish();
    EXPECT_EQ(run.spilled(), range(0, 3));
    EXPECT_EQ(Queued::steps(*run.tracker), range(0, 5));
  });
  EXPECT_THAT(text, HasSubstr("the disk is full"));
  EXPECT_EQ(times(text, "\n"), 1u) << text;
}

TEST(TrackerQueue, OneThatNeverConnectsLosesNothing) {
  const auto text = said([] {
    Queued run([](auto& tracker) { tracker.connects = false; });
    run.queued->store_init_configuration({{"lr", 0.1}});
    run.log(0, 3);
    run.queued->finish();
    EXPECT_TRUE(run.tracker->rows.empty());
    EXPECT_EQ(run.spilled(), range(0, 3));
    MemoryTracker read;
    read_json_lines(run.path, [&](const JsonLine& line) {
      if (line.record) line.record->write(read, {});
    });
    EXPECT_EQ(read.configuration, (TrackerValues{{"lr", 0.1}}));
  });
  EXPECT_THAT(text, HasSubstr("no server answers"));
}

TEST(TrackerQueue, OneThatDoesNotEndIsLeftBehindAndLosesNothing) {
  const support::Variable timeout("ACCELERATE_TRACKER_TIMEOUT", "0.2");
  std::shared_ptr<StubbornTracker> tracker;
  const auto text = said([&] {
    Queued run([](auto& one) { one.holds = true; });
    tracker = run.tracker;
    run.log(0, 5);
    while (!run.tracker->inside) std::this_thread::sleep_for(milliseconds(1));
    run.queued->finish();
    EXPECT_EQ(run.spilled(), range(0, 5));
  });
  EXPECT_THAT(text, HasSubstr("it did not end in time"));
  tracker->holds = false;  // its thread goes on by itself, and touches nothing that is no more
  while (tracker.use_count() > 1) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_EQ(tracker->taken, 1);
}

TEST(TrackerQueue, WithoutAnEndItIsFlushedToo) {
  std::shared_ptr<StubbornTracker> tracker;
  {
    Queued run;
    tracker = run.tracker;
    run.log(0, 100);
  }
  EXPECT_EQ(tracker->rows.size(), 100u);
  EXPECT_TRUE(tracker->finished);
}

TEST(TrackerQueue, WithoutAnEndAHangingOneIsLeftBehind) {
  std::shared_ptr<StubbornTracker> tracker;
  const auto text = said([&] {
    Queued run([](auto& one) { one.hangs_at_end = true; });
    tracker = run.tracker;
    run.log(0, 3);
  });
  EXPECT_THAT(text, HasSubstr("it did not end in time"));
  EXPECT_THAT(text, Not(HasSubstr("unsent"))) << "nothing is";
  tracker->hangs_at_end = false;
  while (tracker.use_count() > 1) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_EQ(tracker->taken, 3);
}

TEST(TrackerQueue, ManyThreadsMayLog) {
  Queued run;
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 4; ++t) threads.emplace_back([&run, t] { run.log(t * 500, (t + 1) * 500); });
  for (auto& thread : threads) thread.join();
  run.queued->finish();
  auto steps = Queued::steps(*run.tracker);
  std::sort(steps.begin(), steps.end());
  EXPECT_EQ(steps, range(0, 2000));
}

TEST(TrackerQueue, TimesAreThoseOfTheLogging) {
  Queued run([](auto& tracker) { tracker.holds = true; });
  const double before = wall_time();
  run.log(0, 1);
  const double after = wall_time();
  std::this_thread::sleep_for(milliseconds(300));
  run.tracker->holds = false;
  run.queued->finish();
  EXPECT_GE(run.tracker->rows.at(0).time, before);
  EXPECT_LE(run.tracker->rows.at(0).time, after);
}

namespace {
std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}
}  // namespace

// A program that is killed, without an end of its trackers: all is there that it logged some time before.
// docs/tracking.md says what "some time" is; here it is as long as it takes, and no flush is asked for.
TEST(TrackerKill, WhatWasLoggedIsInTheFiles) {
  constexpr int64_t kRecords = 20000;
  if (support::is_rank()) {
    const std::filesystem::path folder = variable("TRACKER_FOLDER");
    const auto make = [&](const std::string& name, const std::string& project) {
      auto tracker = tracker_class(name).make({.project_name = project, .logging_dir = folder});
      tracker->start();
      return tracker;
    };
    const auto log = [&](QueuedTracker& queued) {
      for (int64_t i = 0; i < kRecords; ++i) queued.push(record_of_values({{"loss", 0.5}}, i), {});
    };
    const auto bytes_in = [&](const std::string& project) {
      uintmax_t bytes = 0;
      for (const auto& entry : std::filesystem::recursive_directory_iterator(folder / project))
        if (entry.is_regular_file()) bytes += entry.file_size();
      return bytes;
    };
    const auto lines_in = [](const std::filesystem::path& file) {
      std::ifstream in(file);
      return std::count(std::istreambuf_iterator<char>(in), {}, '\n');
    };
    // A run that has ended says how long the file must be.
    QueuedTracker ended(make("tensorboard", "ended"), {"tensorboard", "ended", folder / "unsent-ended"}, {});
    log(ended);
    ended.finish();
    QueuedTracker first(make("tensorboard", "tb"), {"tensorboard", "tb", folder / "unsent-tb"}, {});
    QueuedTracker second(make("jsonl", "lines"), {"jsonl", "lines", folder / "unsent-lines"}, {});
    log(first), log(second);
    const auto until = Clock::now() + std::chrono::seconds(60);
    while ((bytes_in("tb") < bytes_in("ended") || lines_in(folder / "lines/log.jsonl") < kRecords) &&
           Clock::now() < until)
      std::this_thread::sleep_for(milliseconds(20));
    ::raise(SIGKILL);
  }
  SKIP_WITHOUT_PYTHON();
  const auto folder = support::scratch_dir();
  const auto results = support::run_test_in_ranks("TrackerKill.WhatWasLoggedIsInTheFiles",
                                                  {.world_size = 1, .env = {{"TRACKER_FOLDER", folder}}});
  ASSERT_EQ(results.at(0).signal, SIGKILL) << results.at(0).output;
  const auto read = support::run_python("tests/unit/trackers_peer.py", {"killed", folder, std::to_string(kRecords)});
  EXPECT_EQ(read.exit_code, 0) << read.output;
}
