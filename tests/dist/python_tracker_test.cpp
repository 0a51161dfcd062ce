// Trackers that live in a process with Python: what an SDK may do wrong, and what becomes of the numbers then.
#include <accelerate/accelerate.hpp>
#include <accelerate/trackers/python_tracker.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "message_of.hpp"
#include "program.hpp"
#include "python.hpp"
#include "scratch.hpp"
#include "trackers/python_child.hpp"
#include "variable.hpp"
#include "warnings_of.hpp"

namespace {

using namespace accelerate;
using nlohmann::json;
using std::chrono::steady_clock;
using support::message_of;
using support::scratch;
using support::Variable;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr int kOverlong = 60;  // seconds, for what comes at once where nothing else runs

/// An SDK of the name wandb, in the place of the real one.
struct FakeSdk {
  explicit FakeSdk(const std::string& fault = "")
      : file(scratch("arrived.jsonl")),
        python("ACCELERATE_PYTHON", support::python().value_or("python3")),
        path("PYTHONPATH", std::string(ACCELERATE_SOURCE_DIR) + "/tests/dist/fake_sdk"),
        what("FAKE_SDK_FAULT", fault),
        where("FAKE_SDK_FILE", file.string()) {
    std::filesystem::remove(file);
  }
  std::vector<json> arrived() const {
    std::vector<json> lines;
    std::ifstream in(file);
    for (std::string line; std::getline(in, line);) lines.push_back(json::parse(line));
    return lines;
  }
  pid_t pid() const { return arrived().at(0).at("pid").get<pid_t>(); }

  std::filesystem::path file;
  Variable python, path, what, where;
};

std::shared_ptr<PythonTracker> tracker(TrackerValues init_kwargs = {}) {
  return std::make_shared<PythonTracker>(
      "wandb", TrackerSetup{.project_name = "project", .logging_dir = scratch("logs"), .init_kwargs = init_kwargs});
}

TEST(PythonTracker, GivesTheSdkWhatWasLogged) {
  const FakeSdk sdk;
  const auto wandb = tracker({{"tags", TrackerList{"a", "b"}}, {"$odd", 1}});
  EXPECT_THAT(wandb->details(), IsEmpty());
  wandb->connect();
  EXPECT_EQ(wandb->details(), (std::map<std::string, std::string>{{"id", "the id"}, {"name", "the name"}}));
  wandb->store_init_configuration({{"lr", 0.1}, {"adam", TrackerValues{{"betas", TrackerList{0.9, 0.999}}}}});
  wandb->log({{"loss", 0.5}, {"worst", std::nan("")}, {"note", "it's \"ü\"\n"}, {"none", nullptr}, {"most", HUGE_VAL}},
             3, {{"commit", true}});
  wandb->log({{"loss", 0.25}}, std::nullopt);
  wandb->log_table("answers", {"n", "text"}, {{1, "one"}, {2, "two"}}, 4);
  wandb->log_images({{"picture", torch::full({1, 6, 5, 3}, 7, torch::kByte)}}, 5);
  wandb->log_histogram("weights", torch::tensor({1.5, -2.0}, torch::kFloat), 6);
  wandb->finish();

  const auto lines = sdk.arrived();
  ASSERT_EQ(lines.size(), 9u);
  EXPECT_EQ(lines[0].at("project"), "project");
  EXPECT_EQ(lines[0].at("others"), (json{{"tags", {"a", "b"}}, {"$odd", 1}}));
  EXPECT_EQ(lines[0].at("stdin"), "") << "an SDK that asks for something must find the end of the input at once";
  // 3 is the channel; one is of reading the folder itself.
  EXPECT_LE(lines[1].at("descriptors").size(), 7u) << "none of this process's descriptors may be there";
  EXPECT_EQ(lines[2], (json{{"config", {{"lr", 0.1}, {"adam", {{"betas", {0.9, 0.999}}}}}}, {"allowed", true}}));
  EXPECT_EQ(lines[3].at("log"),
            (json{{"loss", 0.5}, {"worst", "nan"}, {"note", "it's \"ü\"\n"}, {"none", nullptr}, {"most", "inf"}}));
  EXPECT_EQ(lines[3].at("others"), (json{{"commit", true}}));
  EXPECT_EQ(lines[4], (json{{"log", {{"loss", 0.25}}}, {"step", nullptr}, {"others", json::object()}}));
  EXPECT_EQ(lines[5].at("log"), (json{{"answers", {{"columns", {"n", "text"}}, {"data", {{1, "one"}, {2, "two"}}}}}}));
  EXPECT_EQ(lines[6].at("log"), (json{{"picture", {{{"shape", {6, 5, 3}}, {"sum", 630}}}}}));
  EXPECT_EQ(lines[7].at("log"), (json{{"weights", {{"values", {1.5, -2.0}}}}}));
  EXPECT_EQ(lines[7].at("step"), 6);
  EXPECT_EQ(lines[8], (json{{"finish", true}}));
  EXPECT_TRUE(cli_test::gone(sdk.pid()));
}

TEST(PythonTracker, SaysWhatIsMissing) {
  {
    const Variable python("ACCELERATE_PYTHON", scratch("no_python").string());
    EXPECT_THAT(message_of<TrackerGone>([] { tracker()->connect(); }),
                AllOf(HasSubstr("no_python"), HasSubstr("No such file"), HasSubstr("ACCELERATE_PYTHON")));
  }
  const FakeSdk sdk;
  const Variable nowhere("PYTHONPATH", scratch("nothing").string());
  EXPECT_THAT(message_of<TrackerGone>([] { tracker()->connect(); }),
              AllOf(HasSubstr("ModuleNotFoundError"), HasSubstr("pip install wandb"), HasSubstr("ACCELERATE_PYTHON")));
  EXPECT_THAT(message_of<ConfigError>([] { PythonTracker("nobody", {}); }), HasSubstr("comet_ml"));
}

TEST(PythonTracker, FindsWhatIsInstalledWithoutImportingIt) {
  const FakeSdk sdk("init:die");
  EXPECT_THAT(installed_packages({"wandb", "no_such_package", "json"}), ElementsAre("wandb", "json"));
  // The folder that wandb itself makes where it runs is no package.
  std::filesystem::create_directories(scratch("wandb"));
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(support::scratch_dir());
  const Variable nowhere("PYTHONPATH", "");
  EXPECT_THAT(installed_packages({"wandb", "json"}), ElementsAre("json"));
  std::filesystem::current_path(before);
}

/// Whatever lies beside the program.
TEST(PythonTracker, ModulesOfTheCurrentFolderAreNotRun) {
  const FakeSdk sdk;
  const auto folder = scratch("beside"), ran = folder / "ran";
  std::filesystem::create_directories(folder);
  for (const char* name : {"base64", "json", "types", "selectors", "threading", "importlib", "os"})
    std::ofstream(folder / (std::string(name) + ".py")) << "open('" << ran.string() << "', 'w').close()\n";
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder);
  EXPECT_THAT(installed_packages({"wandb", "json"}), ElementsAre("wandb", "json"));
  const auto wandb = tracker();
  wandb->connect();
  wandb->finish();
  std::filesystem::current_path(before);
  EXPECT_FALSE(std::filesystem::exists(ran));
  EXPECT_EQ(sdk.arrived().back(), (json{{"finish", true}}));
}

/// A run's name comes from whoever wrote the file, and becomes a folder.
TEST(PythonTracker, ReplayStaysInItsFolder) {
  const auto folder = scratch("replayed");
  std::filesystem::create_directories(folder);
  for (const std::string& run : {std::string("../out"), (folder / "elsewhere").string()}) {
    std::ofstream(folder / "in.jsonl")
        << json{{"kind", "start"}, {"run", run}, {"time", 1.0}, {"format", "accelerate.tracking"}, {"version", 1}}
        << "\n"
        << json{{"kind", "log"}, {"run", run}, {"time", 1.0}, {"step", 1}, {"values", {{"loss", 0.5}}}} << "\n";
    std::vector<std::string> words{cli_test::accelerate_path(),
                                   "track",
                                   "replay",
                                   (folder / "in.jsonl").string(),
                                   "--to",
                                   "jsonl",
                                   "--logging_dir",
                                   (folder / "logs").string()};
    const auto refused = cli_test::Program(words).wait();
    EXPECT_NE(refused.exit_code, 0);
    EXPECT_THAT(refused.err, AllOf(HasSubstr(run), HasSubstr("--project_name")));
    EXPECT_FALSE(std::filesystem::exists(folder / "out") || std::filesystem::exists(folder / "elsewhere"));
    words.insert(words.end(), {"--project_name", "mine"});
    EXPECT_EQ(cli_test::Program(words).wait().exit_code, 0);
    EXPECT_TRUE(std::filesystem::exists(folder / "logs/mine/log.jsonl"));
    std::filesystem::remove_all(folder / "logs");
  }
}

struct FaultCase {
  const char* fault;
  const char* says;
};

class PythonTrackerFaults : public testing::TestWithParam<FaultCase> {};

TEST_P(PythonTrackerFaults, EndTheTrackerAndNothingElse) {
  const FakeSdk sdk(GetParam().fault);
  const Variable limit("ACCELERATE_TRACKER_TIMEOUT", "1");
  const auto wandb = tracker();
  const std::string said = message_of<TrackerGone>([&] {
    wandb->connect();
    wandb->store_init_configuration({{"lr", 0.1}});
    wandb->log({{"loss", 0.5}}, 0);
    wandb->finish();
  });
  EXPECT_THAT(said, AllOf(HasSubstr("wandb"), HasSubstr(GetParam().says)));
  EXPECT_TRUE(cli_test::gone(sdk.pid())) << "its process is left over";
  EXPECT_THROW(wandb->log({{"loss", 0.5}}, 1), TrackerGone);
}

INSTANTIATE_TEST_SUITE_P(
    All, PythonTrackerFaults,
    testing::Values(FaultCase{"init:hang", "did not answer in 1 s"}, FaultCase{"init:spin", "did not answer in 1 s"},
                    FaultCase{"init:leave", "SystemExit: not logged in"}, FaultCase{"init:ask", "EOFError"},
                    FaultCase{"init:raise_error", "ValueError: no such project"}, FaultCase{"init:die", "signal 9"},
                    FaultCase{"config:hang", "did not answer"},
                    FaultCase{"log:hang", "'log': it did not answer in 1 s"}, FaultCase{"log:die", "signal 9"},
                    FaultCase{"log:mid_line", "status 0"}, FaultCase{"finish:hang", "did not answer in 1 s"},
                    FaultCase{"finish:die", "signal 9"}),
    [](const auto& info) {
      std::string name = info.param.fault;
      for (char& byte : name)
        if (byte == ':') byte = '_';
      return name;
    });

TEST(PythonTracker, WhatAnSdkPrintsIsNoAnswer) {
  for (const char* fault : {"log:flood", "log:answer_in_our_place"}) {
    const FakeSdk sdk(fault);
    const auto wandb = tracker();
    wandb->connect();
    wandb->log({{"loss", 0.5}}, 0);
    wandb->finish();
    const auto lines = sdk.arrived();
    ASSERT_EQ(lines.size(), 4u) << fault;
    EXPECT_EQ(lines[2].at("log"), (json{{"loss", 0.5}}));
  }
}

TEST(PythonTracker, OneRecordThatTheSdkRefusesIsOnlyThat) {
  const FakeSdk sdk("log:raise_error");
  const auto wandb = tracker();
  wandb->connect();
  EXPECT_THAT(message_of<ResourceError>([&] { wandb->log({{"loss", 0.5}}, 0); }), HasSubstr("no such project"));
  wandb->store_init_configuration({{"lr", 0.1}});
  wandb->finish();
  EXPECT_EQ(sdk.arrived().size(), 4u);
}

/// The numbers that arrived, by their steps.
std::map<int64_t, double> losses(const FakeSdk& sdk) {
  std::map<int64_t, double> found;
  for (const auto& line : sdk.arrived())
    if (line.contains("log")) found[line.at("step").get<int64_t>()] = line.at("log").at("loss").get<double>();
  return found;
}

class PythonTrackerTraining : public testing::TestWithParam<const char*> {};

TEST_P(PythonTrackerTraining, GoesOnAndNothingIsLost) {
  constexpr int64_t kSteps = 300;
  const auto folder = scratch("project");
  std::map<int64_t, double> arrived;
  {
    const FakeSdk sdk(GetParam());
    const Variable limit("ACCELERATE_TRACKER_TIMEOUT", "1");
    Accelerator accelerator({.log_with = {"wandb"}, .project_dir = folder});
    accelerator.init_trackers("run", {{"lr", 0.1}});
    for (int64_t step = 0; step < kSteps; ++step) {
      accelerator.log({{"loss", 1.0 / static_cast<double>(step + 1)}}, step);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    accelerator.end_training();
    arrived = losses(sdk);
  }

  // Records that did not arrive lie in a file, which goes to the tracker later.
  std::vector<std::filesystem::path> unsent;
  if (std::filesystem::exists(folder / "unsent"))
    for (const auto& entry : std::filesystem::directory_iterator(folder / "unsent")) unsent.push_back(entry.path());
  if (unsent.empty()) {
    EXPECT_EQ(arrived.size(), static_cast<size_t>(kSteps));
    return;
  }
  ASSERT_EQ(unsent.size(), 1u);
  const FakeSdk sound;
  cli_test::Program replay({cli_test::accelerate_path(), "track", "replay", unsent[0].string(), "--to", "wandb"});
  const auto result = replay.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("records went to wandb"));
  for (const auto& [step, loss] : losses(sound)) arrived[step] = loss;
  ASSERT_EQ(arrived.size(), static_cast<size_t>(kSteps));
  for (const auto& [step, loss] : arrived) EXPECT_EQ(loss, 1.0 / static_cast<double>(step + 1));
  EXPECT_EQ(sound.arrived().at(0).at("project"), "run");
}

INSTANTIATE_TEST_SUITE_P(All, PythonTrackerTraining,
                         testing::Values("", "init:hang", "init:raise_error", "log:hang", "log:die", "log:raise_error",
                                         "log:mid_line", "finish:hang"));

/// If a step waited for the SDK, the tracker would be given up when its time is over.
TEST(PythonTracker, StepsGoOnWhileTheSdkIsStopped) {
  constexpr int64_t kSteps = 100;
  const FakeSdk sdk;
  Accelerator accelerator({.log_with = {"wandb"}, .project_dir = scratch("project")});
  accelerator.init_trackers("run");
  accelerator.log({{"loss", 1.0}}, 0);
  accelerator.get_tracker("wandb", /*unwrap=*/true);  // waits until that is out
  const pid_t child = sdk.pid();
  ::kill(child, SIGSTOP);
  for (int64_t step = 1; step < kSteps; ++step) accelerator.log({{"loss", 1.0}}, step);
  EXPECT_EQ(losses(sdk).size(), 1u);
  ::kill(child, SIGCONT);
  accelerator.end_training();
  EXPECT_EQ(losses(sdk).size(), static_cast<size_t>(kSteps));
}

/// A rank with a tracker, until it is killed.
TEST(PythonTrackerRank, DISABLED_WaitsToBeKilled) {
  Accelerator accelerator({.log_with = {"wandb"}, .project_dir = scratch("project")});
  accelerator.init_trackers("run");
  accelerator.log({{"loss", 0.5}}, 0);
  std::printf("logged\n");
  std::fflush(stdout);
  std::this_thread::sleep_for(std::chrono::seconds(100));
}

TEST(PythonTrackerRank, TakesItsChildAlongWhenItIsKilled) {
  for (const char* fault : {"", "log:hang", "log:spin"}) {
    const FakeSdk sdk(fault);
    cli_test::Program rank({"/proc/self/exe", "--gtest_also_run_disabled_tests",
                            "--gtest_filter=PythonTrackerRank.DISABLED_WaitsToBeKilled"});
    ASSERT_TRUE(rank.wait_for("logged")) << rank.errors();
    const auto until = steady_clock::now() + std::chrono::seconds(kOverlong);
    while (sdk.arrived().size() < (*fault ? 2u : 3u) && steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    rank.signal(SIGKILL);
    rank.wait();
    EXPECT_TRUE(cli_test::gone(sdk.pid(), std::chrono::milliseconds(60000))) << fault;
    // An SDK that still works may end its run.
    if (!*fault) {
      EXPECT_EQ(sdk.arrived().back(), (json{{"finish", true}}));
    }
  }
}

}  // namespace
