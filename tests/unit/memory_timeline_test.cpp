#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "accelerate/accelerator.hpp"
#include "accelerate/profiler.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "scratch.hpp"

using namespace accelerate;

namespace {

using nlohmann::json;
using support::message_of;
using support::scratch;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// PyTorch's numbers of categories and actions.
enum Category { kParameter, kOptimizer, kInput, kTemporary, kActivation, kGradient, kAutograd, kUnknown, kCategories };
enum Action { kPreexisting = 1, kCreate = 2, kDestroy = 4 };

constexpr int64_t kParameters = (64 * 96 + 96 + 96 * 32 + 32) * 4;
const ProfileKwargs kWithMemory = {.activities = {{"cpu"}}, .record_shapes = true, .profile_memory = true};

struct Training {
  Accelerator accelerator{{.cpu = true}};
  torch::nn::Sequential model{torch::nn::Linear(64, 96), torch::nn::ReLU(), torch::nn::Linear(96, 32)};

  Training() {
    const torch::NoGradGuard no_grad;
    for (auto& p : model->parameters()) p.fill_(0.01);
  }
  /// The step of memory_timeline_peer.py.
  template <class M> static void step(M& model) {
    const auto x = torch::full({50, 64}, 0.5);
    const auto y = model(x);
    const auto loss = y.mul(y).sum();
    loss.backward();
    for (auto& p : model->parameters()) p.mutable_grad().reset();
  }
};

json json_of(const std::filesystem::path& file) { return json::parse(std::ifstream(file)); }

std::string read_text(const std::filesystem::path& file) {
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

json raw_timeline(const Profile& profile) {
  profile.export_memory_timeline(scratch("memory.raw.json"));
  return json_of(scratch("memory.raw.json"));
}

/// Sizes of what came in a category, sorted.
std::vector<int64_t> sizes(const json& raw, int category, int action) {
  std::vector<int64_t> found;
  for (const auto& one : raw)
    if (one[1] == action && one[3] == category) found.push_back(one[2]);
  std::sort(found.begin(), found.end());
  return found;
}
int64_t sum(const json& raw, int category, int action) {
  int64_t all = 0;
  for (const int64_t size : sizes(raw, category, action)) all += size;
  return all;
}

/// The most bytes at once.
int64_t peak(const json& timeline) {
  int64_t most = 0;
  for (const auto& row : timeline[1]) {
    int64_t now = 0;
    for (const auto& one : row) now += one.get<int64_t>();
    most = std::max(most, now);
  }
  return most;
}

TEST(MemoryTimeline, IsPyTorchsOfTheSameOperators) {
  SKIP_WITHOUT_PYTHON();
  Training training;
  auto model = training.accelerator.prepare(training.model);
  Training::step(model);
  auto profile = training.accelerator.profile(kWithMemory);
  for (int i = 0; i < 2; ++i) Training::step(model);
  profile.stop();
  const auto raw = raw_timeline(profile);
  profile.export_memory_timeline(scratch("memory.json"));

  const auto theirs = scratch("theirs.raw.json.gz").string(), plain = scratch("theirs.json").string();
  const auto result = support::run_python("tests/unit/memory_timeline_peer.py", {theirs, plain});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  ASSERT_EQ(std::system(("gzip -df " + theirs).c_str()), 0);
  const auto their_raw = json_of(scratch("theirs.raw.json"));
  for (int category = 0; category < kCategories; ++category) {
    EXPECT_EQ(sizes(raw, category, kCreate), sizes(their_raw, category, kCreate)) << category;
    EXPECT_EQ(sizes(raw, category, kPreexisting), sizes(their_raw, category, kPreexisting)) << category;
  }
  EXPECT_EQ(peak(json_of(scratch("memory.json"))), peak(json_of(plain)));
}

TEST(MemoryTimeline, SaysWhatATrainingsMemoryIsFor) {
  Training training;
  auto [model, optimizer] =
      training.accelerator.prepare(training.model, std::make_shared<torch::optim::Adam>(training.model->parameters()));
  auto profile = training.accelerator.profile(kWithMemory);
  for (int i = 0; i < 2; ++i) {
    const auto x = torch::full({50, 64}, 0.5);
    training.accelerator.backward(model(x).pow(2).mean());
    optimizer.step();
    if (i == 0) optimizer.zero_grad();
  }
  profile.stop();
  const auto raw = raw_timeline(profile);
  EXPECT_EQ(sum(raw, kParameter, kPreexisting), kParameters);
  EXPECT_EQ(sum(raw, kParameter, kCreate), 0);
  EXPECT_EQ(sum(raw, kOptimizer, kCreate), 2 * kParameters);  // two moments of Adam, which stay
  EXPECT_EQ(sum(raw, kOptimizer, kDestroy), 0);
  EXPECT_EQ(sum(raw, kGradient, kCreate), 2 * kParameters);  // of both steps
  EXPECT_EQ(sum(raw, kGradient, kDestroy), -kParameters);
  EXPECT_EQ(sizes(raw, kInput, kCreate), (std::vector<int64_t>{50 * 64 * 4, 50 * 64 * 4}));
  const auto activations = sizes(raw, kActivation, kCreate);
  EXPECT_EQ(std::count(activations.begin(), activations.end(), 50 * 96 * 4), 4);  // a layer's and its relu's
  EXPECT_EQ(sum(raw, kActivation, kDestroy), -sum(raw, kActivation, kCreate));
  EXPECT_EQ(sum(raw, kTemporary, kDestroy), -sum(raw, kTemporary, kCreate));
}

TEST(MemoryTimeline, WithoutAnAcceleratorThePurposeIsToldByOperatorsOrTheProgram) {
  const auto w = torch::full({64, 96}, 0.1, torch::requires_grad());
  const auto run = [&](ProfileProcess process) {
    Profile profile(kWithMemory, std::move(process));
    const auto x = torch::full({50, 64}, 0.5);
    x.matmul(w).sigmoid().sum().backward();
    w.mutable_grad().reset();
    profile.stop();
    return raw_timeline(profile);
  };
  const auto alone = run({});
  EXPECT_EQ(sizes(alone, kParameter, kPreexisting), std::vector<int64_t>());
  EXPECT_EQ(sizes(alone, kUnknown, kPreexisting), std::vector<int64_t>{64 * 96 * 4});
  EXPECT_EQ(sizes(alone, kGradient, kCreate), std::vector<int64_t>{64 * 96 * 4});
  EXPECT_THAT(sizes(alone, kActivation, kCreate), ::testing::Contains(50 * 96 * 4));  // sigmoid's, which backward needs
  const auto told = run({.storages = [&] { return std::vector<ProfileStorage>{{w.storage().data(), {}}}; }});
  EXPECT_EQ(sizes(told, kParameter, kPreexisting), std::vector<int64_t>{64 * 96 * 4});
  EXPECT_EQ(sizes(told, kInput, kCreate), std::vector<int64_t>{50 * 64 * 4});
}

TEST(MemoryTimeline, MomentsAddUpToTheRawEventsAndThePageShowsThem) {
  Training training;
  auto model = training.accelerator.prepare(training.model);
  auto profile = training.accelerator.profile(kWithMemory);
  Training::step(model);
  profile.stop();
  const auto raw = raw_timeline(profile);
  profile.export_memory_timeline(scratch("memory.json"));
  const auto moments = json_of(scratch("memory.json"));
  ASSERT_EQ(moments[0].size(), moments[1].size());
  EXPECT_TRUE(std::is_sorted(moments[0].begin(), moments[0].end()));
  std::vector<int64_t> end(kCategories + 1);
  for (const auto& one : raw) end[one[3].get<size_t>() + 1] += one[2].get<int64_t>();
  EXPECT_EQ(moments[1].back(), json(end));
  EXPECT_EQ(moments[1].front()[kParameter + 1], kParameters);

  profile.export_memory_timeline(scratch("memory.html"));
  const auto page = read_text(scratch("memory.html"));
  EXPECT_THAT(page, AllOf(HasSubstr("Memory of cpu"), HasSubstr("<title>activation</title>"),
                          HasSubstr("<title>parameter</title>"), Not(HasSubstr("<title>optimizer state</title>")),
                          Not(HasSubstr("://")), Not(HasSubstr("<script"))));
  char most[32];
  std::snprintf(most, sizeof(most), "At most %.3f MiB", static_cast<double>(peak(moments)) / (1 << 20));
  EXPECT_THAT(page, HasSubstr(most));
}

TEST(MemoryTimeline, AProfileMayLiveLongerThanItsAccelerator) {
  std::optional<Profile> profile;
  {
    Training training;
    auto model = training.accelerator.prepare(training.model);
    profile.emplace(training.accelerator.profile(kWithMemory));
    Training::step(model);
  }
  profile->stop();
  EXPECT_EQ(sizes(raw_timeline(*profile), kParameter, kPreexisting), std::vector<int64_t>());
}

TEST(MemoryTimeline, RefusesWhatItCannotDo) {
  const auto refusal = [](const ProfileKwargs& kwargs, const std::filesystem::path& file, const std::string& device) {
    Profile profile(kwargs);
    torch::ones(100);
    profile.stop();
    return message_of<ConfigError>([&] { profile.export_memory_timeline(file, device); });
  };
  const auto file = scratch("memory.json");
  EXPECT_THAT(refusal({.activities = {{"cpu"}}, .profile_memory = true}, file, "cpu"),
              HasSubstr("profile_memory is true and record_shapes is false"));
  EXPECT_THAT(refusal({.activities = {{"cpu"}}, .record_shapes = true}, file, "cpu"),
              HasSubstr("profile_memory is false and record_shapes is true"));
  EXPECT_THAT(refusal(kWithMemory, scratch("memory.png"), "cpu"), HasSubstr("'memory.png', expected .json"));
  EXPECT_THAT(refusal(kWithMemory, scratch("memory.json.gz"), "cpu"), HasSubstr("gzip FILE"));
  EXPECT_THAT(refusal(kWithMemory, file, "gpu"), HasSubstr("device is 'gpu', expected one like"));
  EXPECT_THAT(refusal(kWithMemory, file, "cuda:1"), HasSubstr("nothing was recorded, expected one of: cpu"));
  EXPECT_FALSE(std::filesystem::exists(file));
}

}  // namespace
