// The files of DVCLive, which its real package and DVC read.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "message_of.hpp"
#include "python.hpp"
#include "read_trackers.hpp"
#include "scratch.hpp"
#include "variable.hpp"

namespace {

using namespace accelerate;
using nlohmann::json;
using support::message_of;
using support::scratch;
using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

/// The test's own folder is the current one.
class DvcliveTest : public testing::Test {
 protected:
  DvcliveTest() : before_(fs::current_path()) { fs::current_path(support::scratch_dir()); }
  ~DvcliveTest() override { fs::current_path(before_); }
  static std::shared_ptr<GeneralTracker> open(TrackerValues init_kwargs = {}) {
    auto tracker = tracker_class("dvclive").make({.project_name = "ignored", .init_kwargs = std::move(init_kwargs)});
    tracker->start();
    return tracker;
  }
  static std::string text_of(const fs::path& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }

 private:
  fs::path before_;
};

TEST_F(DvcliveTest, WritesWhatDvcliveAndDvcRead) {
  SKIP_WITHOUT_TRACKERS_PYTHON();
  support::in_trackers_venv("dvc init --no-scm -q");
  {
    Accelerator accelerator({.log_with = {"dvclive"}});
    accelerator.init_trackers(
        "run", {{"lr", 0.1}, {"adam", TrackerValues{{"betas", TrackerList{0.9, 0.999}}}}, {"note", "x: y"}});
    accelerator.log({{"train/loss", 1.0}, {"acc", 0}, {"note", "one\ttwo \"three\""}}, 0);
    accelerator.log({{"train/loss", 0.3333333333333333}, {"acc", std::nan("")}}, 1);
    accelerator.log({{"train/loss", 1e-5}, {"acc", 2}});
    accelerator.log_images({{"picture", torch::full({2, 6, 5, 3}, 200, torch::kByte)}}, 2);
    accelerator.end_training();
  }
  const json found = support::read_trackers("dvclive", ".");
  // DVCLive goes on with the step after the last.
  EXPECT_EQ(found.at("step"), 3);
  EXPECT_EQ(found.at("latest"),
            (json{{"train", {{"loss", 1e-5}}}, {"acc", 2}, {"note", "one\ttwo \"three\""}, {"step", 2}}));
  const json params{{"lr", 0.1}, {"adam", {{"betas", {0.9, 0.999}}}}, {"note", "x: y"}};
  EXPECT_EQ(found.at("params"), params);
  EXPECT_EQ(found.at("dvc_params"), params);
  EXPECT_EQ(found.at("dvc_metrics"), found.at("latest"));
  EXPECT_EQ(found.at("values").at("metrics/train/loss.tsv"), (json{{{"step", "0"}, {"loss", "1.0"}},
                                                                   {{"step", "1"}, {"loss", "0.3333333333333333"}},
                                                                   {{"step", "2"}, {"loss", "1e-05"}}}));
  EXPECT_EQ(found.at("values").at("metrics/acc.tsv").at(1), (json{{"step", "1"}, {"acc", "nan"}}));
  EXPECT_EQ(found.at("values").at("metrics/note.tsv").at(0), (json{{"step", "0"}, {"note", "one\ttwo \"three\""}}));
  EXPECT_EQ(found.at("images"), (json{{"picture/2_0.png", {{5, 6}, "RGB", {200, 200, 200}}},
                                      {"picture/2_1.png", {{5, 6}, "RGB", {200, 200, 200}}}}));
  EXPECT_THAT(found.at("plots").get<std::string>(), AllOf(HasSubstr("loss.tsv"), HasSubstr("acc.tsv")));
}

TEST_F(DvcliveTest, BeginsAnewOrGoesOn) {
  for (int run = 0; run < 2; ++run) {
    const auto tracker = open({{"dir", "live"}});
    tracker->store_init_configuration({{"lr", 0.1}});
    tracker->log({{"loss", 1.0}}, std::nullopt);
    tracker->log({{"loss", 0.5}}, std::nullopt, {{"plot", false}});
  }
  EXPECT_EQ(text_of("live/plots/metrics/loss.tsv"), "step\tloss\n0\t1.0\n") << "the first run's row is to be gone";
  const auto tracker = open({{"dir", "live"}, {"resume", true}});
  tracker->store_init_configuration({{"epochs", 3}});
  tracker->set_time(1700000000.25);
  tracker->log({{"other", 0.25}}, std::nullopt, {{"timestamp", true}});
  EXPECT_EQ(text_of("live/plots/metrics/other.tsv"), "timestamp\tstep\tother\n1700000000250\t2\t0.25\n");
  EXPECT_EQ(json::parse(text_of("live/metrics.json")), (json{{"loss", 0.5}, {"other", 0.25}, {"step", 2}}));
  EXPECT_EQ(text_of("live/params.yaml"), "epochs: 3\nlr: 0.1\n");
}

TEST_F(DvcliveTest, LeavesSomebodysPipelineAlone) {
  std::ofstream("dvc.yaml") << "# mine\nstages: {}\n";
  open()->log({{"loss", 1.0}}, 0);
  EXPECT_EQ(text_of("dvc.yaml"), "# mine\nstages: {}\n");
  EXPECT_EQ(text_of("dvclive/dvc.yaml"), "metrics:\n- metrics.json\nplots:\n- plots/metrics:\n    x: step\n");
  fs::remove("dvc.yaml");
  open({{"dvcyaml", "below/dvc.yaml"}, {"dir", "below/live"}})->log({{"loss", 1.0}}, 0);
  EXPECT_THAT(text_of("below/dvc.yaml"), HasSubstr("- live/metrics.json\n"));
  open({{"dvcyaml", false}})->log({{"loss", 1.0}}, 0);
  EXPECT_FALSE(fs::exists("dvc.yaml"));
}

TEST_F(DvcliveTest, RefusesWhatItCanNotDo) {
  EXPECT_THAT(message_of<ConfigError>([] {
                open({{"save_dvc_exp", true}});
              }),
              AllOf(HasSubstr("save_dvc_exp"), HasSubstr("dvc exp save")));
  EXPECT_THAT(message_of<ConfigError>([] { open({{"colour", "red"}}); }), HasSubstr("colour"));
  EXPECT_THAT(message_of<ConfigError>([] { open({{"dir", 3}}); }), HasSubstr("dir = 3"));
  EXPECT_THAT(message_of<ConfigError>([] { open({{"dvcyaml", "x.yaml"}}); }), HasSubstr("dvc.yaml"));
  const auto tracker = open({{"save_dvc_exp", false}, {"report", nullptr}});
  for (const char* name : {"../out", "/tmp/out", "a/../../b", ""})
    EXPECT_THAT(message_of<ConfigError>([&] { tracker->log({{name, 1}}, 0); }), HasSubstr("a file's"));
  EXPECT_THROW(tracker->log({{"loss", 1}}, 0, {{"colour", "red"}}), ConfigError);
  std::ofstream("file") << "x";
  EXPECT_THROW(open({{"dir", "file/below"}}), CheckpointError);
}

TEST_F(DvcliveTest, IsAmongAllWhereThereIsAProjectOfDvc) {
  EXPECT_THAT(available_trackers(), testing::Not(testing::Contains("dvclive")));
  fs::create_directories(".dvc");
  fs::create_directories("below");
  fs::current_path("below");
  EXPECT_THAT(available_trackers(), testing::Contains("dvclive"));
}

}  // namespace
