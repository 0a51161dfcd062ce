// Trackers as a program sees them: values, names and objects in log_with, arguments by tracker, JSON lines.
#include <accelerate/accelerator.hpp>
#include <accelerate/trackers/memory_tracker.hpp>
#include <accelerate/utils/kwargs_dict.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "input/base64.hpp"
#include "message_of.hpp"
#include "scratch.hpp"
#include "stubborn_tracker.hpp"
#include "trackers/json_lines.hpp"
#include "variable.hpp"
#include "warnings_of.hpp"

using namespace accelerate;
using support::message_of;
using support::StubbornTracker;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

namespace {

/// The message of reading a file with these lines.
std::string damage(const std::string& lines) {
  const auto path = support::scratch("damaged.jsonl");
  std::ofstream(path) << lines;
  return message_of<CheckpointError>([&] { read_json_lines(path, [](const JsonLine&) {}); });
}

}  // namespace

TEST(TrackerValues, AreMadeOfOrdinaryOnes) {
  const TrackerValues values{{"bool", true},     {"int", 3},    {"size", size_t{4}}, {"huge", UINT64_MAX},
                             {"float", 0.5f},    {"text", "a"}, {"none", nullptr},   {"list", std::vector<int>{1, 2}},
                             {"map", {{"a", 1}}}};
  EXPECT_TRUE(std::get<bool>(values.at("bool").value));
  EXPECT_EQ(std::get<int64_t>(values.at("int").value), 3);
  EXPECT_EQ(values.at("size").whole(), 4);
  EXPECT_EQ(std::get<double>(values.at("huge").value), static_cast<double>(UINT64_MAX));
  EXPECT_EQ(values.at("float").number(), 0.5);
  EXPECT_EQ(*values.at("text").text(), "a");
  EXPECT_FALSE(values.at("text").number());
  EXPECT_FALSE(values.at("none").number());
  EXPECT_EQ(values.at("list"), TrackerValue(TrackerList{1, 2}));
  EXPECT_EQ(values.at("map"), TrackerValue(std::map<std::string, int>{{"a", 1}}));
  EXPECT_EQ(TrackerValue(std::optional<int>()), TrackerValue(nullptr));
  EXPECT_FALSE(TrackerValue(1) == TrackerValue(1.0));
  const auto handler = to_tracker_values(to_dict(GradScalerKwargs{}));
  EXPECT_EQ(handler.at("growth_factor"), TrackerValue(2.0));
}

TEST(JsonLines, ComeBackAsTheyWere) {
  torch::manual_seed(0);
  const auto path = support::scratch("a/b/log.jsonl");
  JsonLinesTracker lines({.project_name = "p", .path = path});
  lines.start();
  lines.set_time(12.25);
  const TrackerValues values{{"a", 1},
                             {"b", 0.1},
                             {"one", 1.0},
                             {"c", NAN},
                             {"d", -HUGE_VAL},
                             {"$number", "nan"},
                             {"$$", nullptr},
                             {"text", "line\nend \xff"},
                             {"list", TrackerList{1, "x", TrackerList{}, true}},
                             {"map", {{"$number", 1}}}};
  lines.store_init_configuration(values);
  lines.log(values, 7, {{"k", 1}});
  lines.log({{"x", 1}}, std::nullopt);
  const auto image = torch::randint(0, 256, {2, 3, 4}, torch::kByte);
  lines.log_images({{"i", image}, {"half", torch::rand({1, 2, 2}, torch::kHalf)}}, 1);
  lines.log_table("t", {"x", "y"}, {{1, HUGE_VAL}, {"a", nullptr}}, 2);
  const auto histogram = torch::randn({5}, torch::kDouble);
  lines.log_histogram("h", histogram, 3);
  lines.finish();

  MemoryTracker read;
  std::vector<double> times;
  int64_t others = 0;
  read_json_lines(path, [&](const JsonLine& line) {
    EXPECT_EQ(line.project_name, "p");
    if (!line.record) {
      ++others;
      return;
    }
    times.push_back(line.record->time);
    line.record->write(read, line.log_kwargs);
  });
  EXPECT_EQ(others, 2);
  EXPECT_EQ(times, std::vector<double>(6, 12.25));
  auto same = values;  // bytes that are no UTF-8 are replaced, and NaN is not itself
  same["text"] = "line\nend \xEF\xBF\xBD";
  EXPECT_TRUE(std::isnan(*read.configuration.at("c").number()));
  same.erase("c"), read.configuration.erase("c"), read.rows.at(0).values.erase("c");
  EXPECT_EQ(read.configuration, same);
  EXPECT_EQ(read.rows.at(0).values, same);
  EXPECT_EQ(read.rows.at(0).step, 7);
  EXPECT_EQ(read.rows.at(0).log_kwargs, (TrackerValues{{"k", 1}}));
  EXPECT_FALSE(read.rows.at(1).step);
  EXPECT_EQ(read.images.at(1).name, "i");
  EXPECT_TRUE(torch::equal(read.images.at(1).image, image));
  EXPECT_EQ(read.images.at(0).image.scalar_type(), torch::kFloat);
  EXPECT_EQ(read.tables.at(0).columns, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(read.tables.at(0).rows.at(0).at(1), TrackerValue(HUGE_VAL));
  EXPECT_TRUE(torch::equal(read.histograms.at(0).values, histogram));
}

TEST(JsonLines, AreAppendedAndATornLineIsLeftOut) {
  const auto path = support::scratch("log.jsonl");
  for (int64_t run = 0; run < 2; ++run) {
    JsonLinesTracker lines({.project_name = "p", .path = path});
    lines.start();
    lines.log({{"x", run}}, run);
    lines.finish();
  }
  MemoryTracker read;
  const auto is_whole = [&] {
    read.rows.clear();
    return read_json_lines(path, [&](const JsonLine& line) {
      if (line.record) line.record->write(read, line.log_kwargs);
    });
  };
  EXPECT_TRUE(is_whole());
  std::ofstream(path, std::ios::app) << R"({"kind": "log", "run": "p", "ti)";
  EXPECT_FALSE(is_whole());
  EXPECT_EQ(read.rows.size(), 2u);
  std::ofstream(path, std::ios::app) << R"(me": 1, "values": {"x": 5}})";  // by a program that ends no line
  EXPECT_TRUE(is_whole());
  ASSERT_EQ(read.rows.size(), 3u);
  EXPECT_EQ(read.rows.at(2).values.at("x"), TrackerValue(5));
}

TEST(JsonLines, DamageIsSaidWithItsLine) {
  const std::string start = R"({"kind": "start", "run": "p", "time": 1, "version": 1})"
                            "\n";
  const auto in_log = [&](const std::string& rest) {
    return damage(start + R"({"run": "p", "time": 1, )" + rest + "}\n");
  };
  EXPECT_THAT(in_log(R"("kind": "log")"), HasSubstr("line 2 of"));
  EXPECT_THAT(in_log(R"("kind": "log")"), HasSubstr("there is no 'values' in it"));
  EXPECT_THAT(in_log(R"("kind": "log", "values": [1])"), HasSubstr("found [1], expected an object"));
  EXPECT_THAT(in_log(R"("kind": "log", "values": {"a": {"$number": "one"}})"), HasSubstr("nan, inf or -inf"));
  EXPECT_THAT(in_log(R"("kind": "log", "values": {}, "step": 1.5)"), HasSubstr("a whole number as 'step'"));
  EXPECT_THAT(in_log(R"("kind": "melody")"), HasSubstr("found the kind 'melody'"));
  EXPECT_THAT(in_log(R"("kind": "histogram", "name": "h", "values": {"dtype": "int8", "shape": [], "data": ""})"),
              HasSubstr("as 'dtype'"));
  EXPECT_THAT(in_log(R"("kind": "histogram", "name": "h", "values": {"dtype": "uint8", "shape": [3], "data": "AAA"})"),
              HasSubstr("base64"));
  EXPECT_THAT(in_log(R"("kind": "histogram", "name": "h", "values": {"dtype": "uint8", "shape": [4], "data": "AAAA"})"),
              HasSubstr("has 3 bytes, expected 4"));
  EXPECT_THAT(
      in_log(R"("kind": "histogram", "name": "h", "values": {"dtype": "uint8", "shape": [-3], "data": "AAAA"})"),
      HasSubstr("sizes as 'shape'"));
  // No bytes, and strides that are no numbers.
  EXPECT_THAT(in_log(R"("kind": "histogram", "name": "h", "values": {"dtype": "uint8", "data": "", )"
                     R"("shape": [0, 1099511627776, 1099511627776, 3]})"),
              HasSubstr("sizes as 'shape'"));
  EXPECT_THAT(in_log(R"("kind": "table", "name": "t", "columns": ["a"], "rows": [[1, 2]])"),
              HasSubstr("row 0 of 't' has 2 cells, expected 1"));
  EXPECT_THAT(damage("{]\n"), HasSubstr("line 1 of"));
  EXPECT_THAT(damage(R"({"kind": "start", "run": "p", "time": 1, "version": 9})"
                     "\n"),
              HasSubstr("the version 1"));
}

TEST(Base64, IsThatOfTheStandard) {
  for (const auto& [bytes, text] : std::vector<std::pair<std::string, std::string>>{
           {"", ""}, {"f", "Zg=="}, {"fo", "Zm8="}, {"foo", "Zm9v"}, {"foob", "Zm9vYg=="}, {"\xff\xfe\xfd", "//79"}}) {
    EXPECT_EQ(base64_encode(bytes), text);
    EXPECT_EQ(base64_decode(text), bytes);
  }
  for (const char* text : {"Z", "Zg", "Zg=", "Zh==", "Zm9=", "Zg==Zg==", "Zm!v", "===="})
    EXPECT_FALSE(base64_decode(text)) << text;
}

TEST(Trackers, NamesAndObjectsMixAndArgumentsReachTheirs) {
  const auto mine = std::make_shared<StubbornTracker>();
  const auto folder = support::scratch("runs");
  Accelerator accelerator({.log_with = {"jsonl", mine, "memory", "jsonl"}, .project_dir = folder});
  EXPECT_THAT(message_of<ConfigError>([&] { accelerator.get_tracker("memory"); }), HasSubstr("init_trackers() before"));
  accelerator.init_trackers("run", to_tracker_values(to_dict(AutocastKwargs{})));
  accelerator.log({{"loss", 0.5}, {"note", "warm"}, {"n", 3}}, 1, {{"stubborn", {{"colour", "red"}}}});
  accelerator.log(std::map<std::string, double>{{"loss", 0.25}}, 2);
  accelerator.log({{"x", 1}});
  accelerator.get_tracker("memory")->log({{"only", "here"}}, 3);
  const auto memory = std::dynamic_pointer_cast<MemoryTracker>(accelerator.get_tracker("memory", true));
  ASSERT_TRUE(memory);
  EXPECT_EQ(memory->configuration.at("enabled"), TrackerValue(true));
  ASSERT_EQ(memory->rows.size(), 4u);
  EXPECT_EQ(memory->rows[0].values, (TrackerValues{{"loss", 0.5}, {"note", "warm"}, {"n", 3}}));
  EXPECT_EQ(memory->rows[0].step, 1);
  EXPECT_TRUE(memory->rows[0].log_kwargs.empty());
  EXPECT_FALSE(memory->rows[2].step);
  EXPECT_EQ(accelerator.get_tracker("stubborn", true), mine);
  EXPECT_EQ(mine->rows.size(), 3u);
  EXPECT_EQ(mine->rows[0].log_kwargs, (TrackerValues{{"colour", "red"}}));
  EXPECT_EQ(mine->configuration, memory->configuration);
  EXPECT_FALSE(mine->finished);
  accelerator.end_training();
  EXPECT_TRUE(mine->finished);
  EXPECT_TRUE(memory->finished);
  accelerator.log({{"late", 1}});  // no run is open
  EXPECT_EQ(mine->rows.size(), 3u);
  int64_t lines = 0;
  read_json_lines(folder / "run" / "log.jsonl", [&](const JsonLine&) { ++lines; });
  EXPECT_EQ(lines, 6) << "once, although it is named twice";
}

TEST(Trackers, WhatIsWrongIsSaidAtOnce) {
  const auto message = [](AcceleratorOptions options) {
    return message_of<ConfigError>([&] { Accelerator accelerator(std::move(options)); });
  };
  EXPECT_THAT(message({.log_with = {"nobody"}}), HasSubstr("found 'nobody', expected one of"));
  EXPECT_THAT(message({.log_with = {"jsonl"}}), HasSubstr("'jsonl' without a folder to write to"));
  EXPECT_THROW(TrackerChoice(std::shared_ptr<MemoryTracker>()), ConfigError);
  const auto mine = std::make_shared<StubbornTracker>();
  Accelerator accelerator({.log_with = {"memory", mine}});
  const auto refused = [](auto&& f) { return message_of<ConfigError>(f); };
  EXPECT_THAT(refused([&] {
                accelerator.init_trackers("p", {}, {{"wandb", {}}});
              }),
              HasSubstr("found 'wandb', expected a tracker of log_with (memory, stubborn)"));
  EXPECT_THAT(refused([&] { accelerator.init_trackers("p", {}, {{"memory", {{"a", 1}}}}); }), HasSubstr("found 'a'"));
  EXPECT_THAT(refused([&] {
                accelerator.init_trackers("p", {}, {{"stubborn", {{"a", 1}}}});
              }),
              HasSubstr("an object of yours"));
  accelerator.init_trackers("p");
  EXPECT_THAT(refused([&] { accelerator.log({{"a", 1}}, 1, {{"wandb", {}}}); }), HasSubstr("log_kwargs"));
  EXPECT_THAT(refused([&] { accelerator.get_tracker("wandb"); }), HasSubstr("found 'wandb'"));
  EXPECT_THROW(accelerator.log_table("t", {"a", "b"}, {{1}}), ShapeError);
  EXPECT_THROW(accelerator.log_images({{"i", torch::ones({2, 2})}}), ShapeError);
  EXPECT_THROW(accelerator.log_images({{"i", torch::ones({3, 2, 2}, torch::kLong)}}), ShapeError);
  EXPECT_THROW(accelerator.log_images({{"i", at::Tensor()}}), ShapeError);
  EXPECT_THROW(accelerator.log_histogram("h", at::Tensor()), ShapeError);
  accelerator.end_training();
}

namespace {
/// Takes numbers only.
struct PlainTracker : GeneralTracker {
  std::string name() const override { return "plain"; }
  void store_init_configuration(const TrackerValues&) override {}
  void log(const TrackerValues&, std::optional<int64_t>, const TrackerValues&) override { ++logged; }
  int64_t logged = 0;
};
}  // namespace

TEST(Trackers, ImagesAndTheirKinGoToThoseThatTakeThem) {
  const auto plain = std::make_shared<PlainTracker>();
  {
    Accelerator accelerator({.log_with = {plain}});
    accelerator.init_trackers("p");
    EXPECT_THAT(message_of<ConfigError>([&] {
                  accelerator.log_images({{"i", torch::ones({1, 2, 2})}});
                }),
                HasSubstr("none of the trackers (plain) takes them"));
    EXPECT_THAT(message_of<ConfigError>([&] { accelerator.get_tracker("plain")->log_table("t", {}, {}, 1); }),
                HasSubstr("found tables, which it does not take"));
    EXPECT_THAT(message_of<ConfigError>([&] { plain->log_histogram("h", torch::ones({1}), 1); }),
                HasSubstr("found histograms"));
  }
  Accelerator accelerator({.log_with = {plain, "memory"}});
  accelerator.init_trackers("p");
  auto image = torch::zeros({1, 2, 2});
  accelerator.log_images({{"i", image}}, 1, {{"memory", {{"k", 1}}}});
  image.fill_(1);  // after it was logged
  accelerator.log_table("t", {"a"}, {{1}, {"x"}}, 2);
  accelerator.log_histogram("h", torch::arange(3), 3);
  const auto memory = std::dynamic_pointer_cast<MemoryTracker>(accelerator.get_tracker("memory", true));
  EXPECT_EQ(memory->images.at(0).image.sum().item<float>(), 0);
  EXPECT_EQ(memory->images.at(0).log_kwargs, (TrackerValues{{"k", 1}}));
  EXPECT_EQ(memory->tables.at(0).rows.size(), 2u);
  EXPECT_EQ(memory->histograms.at(0).step, 3);
  accelerator.end_training();
  EXPECT_EQ(plain->logged, 0);
}

TEST(Trackers, WhereUnsentRecordsGoAndWhyIsSaidPlainly) {
  const auto before = std::filesystem::current_path();
  const auto folder = support::scratch("unsent_here");
  std::filesystem::create_directories(folder);
  std::filesystem::current_path(folder);
  const auto stubborn = std::make_shared<StubbornTracker>();
  stubborn->refuses = "full stops.";
  const auto text = support::warnings_of([&] {
    Accelerator accelerator({.log_with = {stubborn}, .project_dir = "."});
    accelerator.init_trackers("p");
    accelerator.log({{"full stops.", 1}});
    accelerator.end_training();
  });
  std::filesystem::current_path(before);
  EXPECT_THAT(text, HasSubstr("does not like full stops. The training"));
  EXPECT_THAT(text, HasSubstr("records go to " + (folder / "unsent" / "p-stubborn").string()));
}

TEST(Trackers, OnesOfYourOwnHaveNamesAndAllAreThoseThatWork) {
  TrackerSetup seen;
  std::shared_ptr<StubbornTracker> made;
  register_tracker_class("mine", {.make = [&](const TrackerSetup& setup) -> std::shared_ptr<GeneralTracker> {
                           seen = setup;
                           made = std::make_shared<StubbornTracker>();
                           made->called = "mine";
                           return made;
                         }});
  register_tracker_class("elsewhere", {.make = [](const TrackerSetup&) { return std::make_shared<StubbornTracker>(); },
                                       .available = [] { return false; }});
  EXPECT_THAT(tracker_names(), Contains("elsewhere"));
  EXPECT_THAT(available_trackers(), Not(Contains("elsewhere")));
  for (const char* name : {"jsonl", "memory", "mine", "tensorboard"}) EXPECT_THAT(available_trackers(), Contains(name));
  const auto object = std::make_shared<PlainTracker>();
  // "all" would also open trackers that ask a network: the set alone shows who is in it.
  Accelerator accelerator({.log_with = {"mine", object}, .project_dir = support::scratch("p")});
  accelerator.init_trackers("project", {}, {{"mine", {{"tags", std::vector<std::string>{"a"}}}}});
  accelerator.log({{"x", 1}}, 1);
  accelerator.end_training();
  EXPECT_EQ(object->logged, 1);
  EXPECT_EQ(made->rows.size(), 1u);
  EXPECT_EQ(seen.project_name, "project");
  EXPECT_EQ(seen.logging_dir, support::scratch("p"));
  EXPECT_EQ(seen.init_kwargs, (TrackerValues{{"tags", TrackerList{"a"}}}));
  EXPECT_THAT(support::warnings_of([] {
                register_tracker_class("mine",
                                       {.make = [](const TrackerSetup&) { return std::make_shared<StubbornTracker>(); },
                                        .available = [] { return false; }});
              }),
              HasSubstr("'mine' was registered already"));
  EXPECT_THROW(register_tracker_class("all", {.make = [](const TrackerSetup&) { return nullptr; }}), ConfigError);
  EXPECT_THROW(register_tracker_class("x", {}), ConfigError);
}

TEST(Trackers, AllIsWhatIsAvailableOnce) {
  Accelerator accelerator({.log_with = {"memory", "all"}, .project_dir = support::scratch("p")});
  accelerator.init_trackers("run");
  accelerator.log({{"x", 1}}, 1);
  for (const auto& name : available_trackers()) EXPECT_EQ(accelerator.get_tracker(name)->name(), name);
  accelerator.end_training();
  EXPECT_TRUE(std::filesystem::exists(support::scratch("p") / "run" / "log.jsonl"));
}

TEST(Trackers, ASecondRunClosesTheFirst) {
  const auto mine = std::make_shared<StubbornTracker>();
  Accelerator accelerator({.log_with = {mine}});
  accelerator.init_trackers("a");
  accelerator.log({{"x", 1}}, 1);
  const auto first = accelerator.get_tracker("stubborn");
  accelerator.init_trackers("b");
  EXPECT_TRUE(mine->finished);
  EXPECT_THROW(first->log({{"x", 1}}, 1), ConfigError);
  accelerator.log({{"x", 2}}, 2);
  accelerator.end_training();
  EXPECT_EQ(mine->rows.size(), 2u);
}

TEST(Trackers, OneThatDoesNotStartClosesTheOthers) {
  struct NeverStarts : StubbornTracker {
    void start() override { throw CheckpointError("the folder is full"); }
  };
  const auto mine = std::make_shared<StubbornTracker>();
  const auto never = std::make_shared<NeverStarts>();
  never->called = "never";
  Accelerator accelerator({.log_with = {mine, never}});
  EXPECT_THAT(message_of<CheckpointError>([&] { accelerator.init_trackers("p", {{"lr", 1}}); }), HasSubstr("is full"));
  EXPECT_TRUE(mine->finished);
  EXPECT_TRUE(mine->configuration.empty());
  accelerator.log({{"x", 1}}, 1);
  EXPECT_THROW(accelerator.get_tracker("stubborn"), ConfigError);
}

TEST(Trackers, TheTimeForTheirEndIsChecked) {
  const support::Variable timeout("ACCELERATE_TRACKER_TIMEOUT", "-1");
  Accelerator accelerator({.log_with = {"memory"}});
  EXPECT_THAT(message_of<ConfigError>([&] { accelerator.init_trackers("p"); }),
              HasSubstr("ACCELERATE_TRACKER_TIMEOUT"));
}

RANKS_TEST(TrackerRanks, OpenOnTheMainProcessUnlessTheySayOtherwise, 2) {
  const auto everywhere = std::make_shared<StubbornTracker>();
  everywhere->called = "everywhere";
  everywhere->every_process = true;
  const auto main_only = std::make_shared<StubbornTracker>();
  Accelerator accelerator({.log_with = {main_only, everywhere}});
  accelerator.init_trackers("p", {{"lr", 1}});
  accelerator.log({{"x", support::rank()}}, 1);
  accelerator.get_tracker("stubborn")->log({{"y", 1}}, 2);
  accelerator.get_tracker("everywhere")->log({{"y", 1}}, 2);
  EXPECT_EQ(accelerator.get_tracker("stubborn", true) == main_only, support::rank() == 0);
  EXPECT_EQ(accelerator.get_tracker("stubborn")->name(), "stubborn");
  accelerator.end_training();
  EXPECT_EQ(main_only->rows.size(), support::rank() == 0 ? 2u : 0u);
  EXPECT_EQ(main_only->configuration.empty(), support::rank() != 0);
  ASSERT_EQ(everywhere->rows.size(), 2u);
  EXPECT_EQ(everywhere->rows[0].values.at("x"), TrackerValue(support::rank()));
}
