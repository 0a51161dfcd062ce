// Logged values in the real Python SDKs, in their offline modes.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <filesystem>

#include "read_trackers.hpp"
#include "scratch.hpp"
#include "variable.hpp"

namespace {

using namespace accelerate;
using nlohmann::json;
using support::scratch;
using support::Variable;
namespace fs = std::filesystem;

class TrackerServices : public testing::TestWithParam<const char*> {};

TEST_P(TrackerServices, FindWhatWasLogged) {
  SKIP_WITHOUT_TRACKERS_PYTHON();
  const std::string name = GetParam();
  const auto before = fs::current_path();
  fs::current_path(support::scratch_dir());
  const Variable python("ACCELERATE_PYTHON", support::trackers_python()), wandb("WANDB_MODE", "offline"),
      clearml("CLEARML_OFFLINE_MODE", "1"), cache("CLEARML_CACHE_DIR", scratch("clearml").string()),
      trackio("TRACKIO_DIR", scratch("trackio").string());
  EXPECT_THAT(available_trackers(), testing::Contains(name));
  TrackerValues init_kwargs;
  if (name == "swanlab") init_kwargs["mode"] = "offline";
  if (name == "comet_ml") init_kwargs["online"] = false;
  {
    Accelerator accelerator({.log_with = {name}, .project_dir = support::scratch_dir()});
    accelerator.init_trackers("project", {{"lr", 0.1}, {"note", "text"}}, {{name, init_kwargs}});
    for (int64_t step = 0; step < 3; ++step)
      accelerator.log({{"train_loss", 1.0 / static_cast<double>(step + 1)}}, step);
    if (name != "clearml") accelerator.log({{"note", "hello"}}, 3);
    accelerator.log_images({{"picture", torch::full({1, 6, 5, 3}, 9, torch::kByte)}}, 4);
    if (name != "aim") accelerator.log_table("table", {"a", "b"}, {{1, "x"}}, 5);
    if (name != "swanlab") accelerator.log_histogram("weights", torch::ones({4}), 6);
    accelerator.end_training();
  }
  EXPECT_FALSE(fs::exists(scratch("unsent"))) << "the SDK did not take something";
  const json found = support::read_trackers(name, ".");
  fs::current_path(before);
  const json losses{{0, 1.0}, {1, 0.5}, {2, 1.0 / 3}};
  if (name == "swanlab") {  // its values are in messages of its own
    EXPECT_THAT(found.at("holds"), testing::Contains("train_loss"));
    EXPECT_EQ(found.at("texts"), (json{"hello"}));
  } else if (name == "aim") {  // which has steps in an order of its own
    EXPECT_EQ(found.at("values").at("train_loss"), (json{1.0, 0.5, 1.0 / 3}));
  } else {
    EXPECT_EQ(found.at("values").at("train_loss"), losses);
  }
  if (name == "clearml") {
    EXPECT_THAT(found.at("config").get<std::string>(), testing::HasSubstr("lr = 0.1"));
  } else if (name != "aim") {
    EXPECT_EQ(found.at("config").at("lr"), 0.1);
  }
  if (name == "wandb" || name == "trackio" || name == "comet_ml" || name == "aim")
    EXPECT_EQ(found.at("project"), "project");
}

INSTANTIATE_TEST_SUITE_P(All, TrackerServices,
                         testing::Values("wandb", "trackio", "swanlab", "comet_ml", "clearml", "aim"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
