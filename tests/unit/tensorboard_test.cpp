// Files for TensorBoard, read by TensorBoard itself and compared with what torch.utils.tensorboard writes.
#include <accelerate/accelerator.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "message_of.hpp"
#include "python.hpp"
#include "scratch.hpp"
#include "trackers/images.hpp"
#include "trackers/json_lines.hpp"

using namespace accelerate;
using support::message_of;
using testing::HasSubstr;

TEST(TensorBoard, ItsEventsAreThoseOfTorch) {
  SKIP_WITHOUT_PYTHON();
  torch::manual_seed(0);
  const auto folder = support::scratch("events");
  Accelerator accelerator({.log_with = {"tensorboard", "jsonl"}, .project_dir = folder});
  accelerator.init_trackers("run", {{"lr", 0.1},
                                    {"layers", 12},
                                    {"name", "it's: a \"name\""},
                                    {"warm", true},
                                    {"none", nullptr},
                                    {"sizes", std::vector<int64_t>{1, 2}},
                                    {"far", HUGE_VAL},
                                    {"$cost", 1},
                                    {"adam", {{"beta", 0.9}}}});
  for (int64_t step = 0; step < 3; ++step)
    accelerator.log({{"loss", 1.0 / static_cast<double>(step + 1)}, {"lr/group 0", 3}, {"good", true}},
                    step * 1000000007);
  accelerator.log({{"loss", NAN}, {"gain", -HUGE_VAL}}, 3);
  accelerator.log({{"note", "ünï *markdown*"}});
  accelerator.log({{"both/curves", {{"a", 1.5}, {"b", 2}}}}, 4);
  const auto tensorboard = accelerator.get_tracker("tensorboard"), lines = accelerator.get_tracker("jsonl");
  const auto layout = torch::rand({4, 7, 3}), transparent = torch::rand({4, 7, 5}), few = torch::randn({1000});
  for (const auto& one : {tensorboard, lines}) {
    one->log({{"new", 0.1}}, 5, {{"new_style", true}, {"walltime", 1234.5}});
    one->log({{"precise", 0.1}}, 5, {{"new_style", true}, {"double_precision", true}, {"walltime", 1234.5}});
    one->log_images({{"layout", layout}}, 6, {{"dataformats", "HWC"}, {"walltime", 5.0}});
    one->log_images({{"transparent", transparent}}, 6, {{"dataformats", "CHW"}, {"walltime", 5.0}});
    one->log_histogram("few", few, 7, {{"max_bins", 40}, {"walltime", 6.0}});
  }
  const auto kwargs = TrackerKwargs{{"jsonl", {{"dataformats", "NHWC"}}}};
  accelerator.log_images(
      {{"grid", torch::rand({11, 3, 6, 9})}, {"bytes", torch::randint(0, 256, {2, 1, 4, 5}, torch::kByte)}}, 8);
  accelerator.log_images({{"last", torch::rand({2, 6, 9, 3}) * 1.5 - 0.2}}, 8, kwargs);
  accelerator.log_histogram("weights", torch::randn({64, 64}), 9);
  accelerator.log_histogram("counts", torch::arange(-5, 50), 9);
  accelerator.log_histogram("zeros", torch::zeros({3, 3}), 9);
  accelerator.log_histogram("tiny", torch::full({2}, 1e-14, torch::kDouble), 9);
  accelerator.log_table("samples", {"x", "what"}, {{1, "a|b"}, {2.5, nullptr}}, 10);
  accelerator.end_training();
  const auto read = support::run_python("tests/unit/trackers_peer.py", {"compare", folder.string()});
  EXPECT_EQ(read.exit_code, 0) << read.output;
  EXPECT_THAT(read.output,
              HasSubstr(R"({"$cost": 1.0, "adam/beta": 0.9, "layers": 12.0, "lr": 0.1, )"
                        R"("name": "it's: a \"name\"", "sizes": "[1,2]", "warm": true} status 1 from True to True)"));
  EXPECT_THAT(read.output, HasSubstr(R"({"$cost": 1, "adam": {"beta": 0.9}, "far": Infinity, "layers": 12, "lr": 0.1, )"
                                     R"("name": "it's: a \"name\"", "none": null, "sizes": [1, 2], "warm": true})"));
}

TEST(TensorBoard, WhatItDoesNotTakeIsSaidAndKept) {
  const auto folder = support::scratch("events");
  const auto tracker = tracker_class("tensorboard").make({.project_name = "run", .logging_dir = folder});
  tracker->start();
  const auto refused = [&](const TrackerValues& values, const TrackerValues& kwargs = {}) {
    return message_of<ConfigError>([&] { tracker->log(values, 0, kwargs); });
  };
  EXPECT_THAT(refused({{"list", std::vector<int>{1}}}), HasSubstr("'list' is [1], expected a number"));
  EXPECT_THAT(refused({{"map", {{"a", "x"}}}}), HasSubstr("a map of numbers"));
  EXPECT_THAT(refused({{"a", 1}}, {{"colour", 1}}), HasSubstr("found 'colour', expected some of walltime"));
  EXPECT_THAT(refused({{"a", 1}}, {{"walltime", "now"}}), HasSubstr("walltime = \"now\", expected a number"));
  EXPECT_THROW(tracker->log_histogram("h", torch::full({2}, NAN), 0), ShapeError);
  EXPECT_THROW(tracker->log_images({{"x", torch::ones({2, 5, 5})}}, 0), ShapeError);
  EXPECT_THROW(tracker->log_images({{"x", torch::ones({3, 5, 5})}}, 0, {{"dataformats", "NCHW"}}), ShapeError);
  EXPECT_THAT(message_of<ConfigError>([&] {
                tracker_class("tensorboard").make({.project_name = "r", .init_kwargs = {{"max_queue", 3}}});
              }),
              HasSubstr("tensorboard: init_kwargs: found 'max_queue', expected some of purge_step"));
  std::ofstream(support::scratch("file")) << "not a folder";
  EXPECT_THROW(
      tracker_class("tensorboard").make({.project_name = "r", .logging_dir = support::scratch("file")})->start(),
      CheckpointError);
}

TEST(TensorBoard, InitKwargsReachTheFile) {
  const auto folder = support::scratch("events");
  const auto size = [](const std::filesystem::path& run) {
    std::uintmax_t all = 0;
    for (const auto& file : std::filesystem::directory_iterator(run)) all += file.file_size();
    return all;
  };
  const auto open = [&](const std::string& name, const TrackerValues& kwargs) {
    auto tracker =
        tracker_class("tensorboard").make({.project_name = name, .logging_dir = folder, .init_kwargs = kwargs});
    tracker->start();
    tracker->flush();
    return tracker;
  };
  const auto plain = open("plain", {}), purged = open("purged", {{"purge_step", 5}}),
             named = open("named", {{"filename_suffix", ".mine"}}), late = open("late", {{"flush_secs", 1000}});
  EXPECT_GT(size(folder / "purged"), size(folder / "plain"));
  EXPECT_THAT(std::filesystem::directory_iterator(folder / "named")->path().string(), testing::EndsWith(".mine"));
  const auto before = size(folder / "late");
  for (const auto& tracker : {plain, late}) {
    tracker->log({{"a", 1}}, 0);
    tracker->flush();
  }
  EXPECT_EQ(size(folder / "late"), before);
  EXPECT_GT(size(folder / "plain"), before);
  late->finish();
  EXPECT_GT(size(folder / "late"), before);
}

TEST(TensorBoard, APngOfAnySizeIsOne) {
  SKIP_WITHOUT_PYTHON();
  torch::manual_seed(0);
  std::vector<std::string> arguments;
  for (const auto& [height, width, channels] :
       std::vector<std::tuple<int64_t, int64_t, int64_t>>{{1, 1, 1}, {300, 301, 3}, {5, 70000, 1}, {9, 8, 4}}) {
    const auto image = torch::randint(0, 256, {height, width, channels}, torch::kByte);
    const auto name = support::scratch(std::to_string(width)).string();
    std::ofstream(name + ".png", std::ios::binary) << encode_png(image);
    std::ofstream(name + ".raw", std::ios::binary)
        .write(reinterpret_cast<const char*>(image.data_ptr()), image.numel());
    arguments.push_back(name);
  }
  const auto read = support::run_python("tests/unit/png_peer.py", arguments);
  EXPECT_EQ(read.exit_code, 0) << read.output;
}
