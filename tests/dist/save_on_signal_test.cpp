// ProjectConfiguration::save_on_signal: whichever rank hears the signal, and wherever the ranks are then, all save at
// one step and end with 75, and the run that goes on is the uninterrupted one bit by bit.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <thread>

#include "comm/group.hpp"
#include "message_of.hpp"
#include "observe/save_points.hpp"
#include "ranks.hpp"

using namespace accelerate;
using support::message_of;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;

namespace {

using std::chrono::milliseconds;

constexpr int64_t kRows = 22, kBatch = 2, kHeld = 400;

/// What a rank does, as the test's process says in the environment.
struct Way {
  int64_t ranks = 1;
  std::string where = "step";  ///< the signal comes: in a step, the last step of a pass, the loader, an evaluation
  std::string who = "all";     ///< or a rank
  int signal = SIGTERM;
  std::string layout = "whole";  ///< or "sharded"
  std::string precision = "no";
  int64_t accumulation = 2;
  std::string shared_memory = "1";
};

std::string told(const char* name) {
  const char* const text = std::getenv(name);
  return text ? text : "";
}

/// Until the process is to save.
void wait_until_heard() {
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
       std::chrono::steady_clock::now() < end; std::this_thread::sleep_for(milliseconds(20)))
    for (const auto& thread : fs::directory_iterator("/proc/self/task")) {
      std::ifstream in(thread.path() / "comm");
      std::string name;
      if (std::getline(in, name) && name == save_points::kSavingThread)
        return std::this_thread::sleep_for(milliseconds(20));
    }
  ADD_FAILURE() << "no thread is about to save";
}

/// Sends the signal to this rank, when the run is where it is to come.
struct Sender {
  bool active = told("SIGNAL_THEN") == "save";
  std::string where = told("SIGNAL_WHERE"), who = told("SIGNAL_WHO");
  bool sent = false;

  void at(const std::string& here, int64_t steps) {
    if (!active || steps < 3) return;
    if (here == where && !sent && (who == "all" || who == std::to_string(support::rank()))) {
      sent = true;
      ::kill(::getpid(), std::stoi(told("SIGNAL_NUMBER")));
      if (support::world_size() == 1) wait_until_heard();
    }
    // The job lasts until it is heard of everywhere.
    if (support::world_size() > 1 && here != "loader") std::this_thread::sleep_for(milliseconds(20));
  }
};

struct Rows : torch::data::datasets::Dataset<Rows, at::Tensor> {
  explicit Rows(std::function<void()> on_read) : on_read(std::move(on_read)) {}
  at::Tensor get(size_t index) override {
    on_read();
    return torch::full({4}, 0.01 * static_cast<double>(index));
  }
  std::optional<size_t> size() const override { return kRows; }
  std::function<void()> on_read;
};

struct Count {
  int64_t steps = 0;
  ACCELERATE_FIELDS(steps)
};

struct Ended {
  std::map<std::string, at::Tensor> state;
  int64_t first = 0, steps = 0;      ///< micro-steps before this process, and in all
  std::vector<int64_t> evaluations;  ///< batches of each
};

/// Trains so many micro-steps (after those of the checkpoint, where there is one), and evaluates after each pass.
Ended train(const fs::path& folder, int64_t micro_steps) {
  AcceleratorState::reset(false);
  GradientState::reset();
  const bool resumes = fs::exists(folder / "checkpoints");
  torch::manual_seed(7 + (resumes ? 100 : 0) + support::rank());
  AcceleratorOptions options{
      .mixed_precision = told("SIGNAL_PRECISION"),
      .gradient_accumulation_steps = std::stoi(told("SIGNAL_ACCUMULATION")),
      .cpu = true,
      .dataloader_config = {.use_stateful_dataloader = true},
      .project_config = {.project_dir = folder, .automatic_checkpoint_naming = true, .save_on_signal = true}};
  if (told("SIGNAL_LAYOUT") == "sharded")
    options.fsdp_plugin = FullyShardedDataParallelPlugin{.state_dict_type = StateDictType::sharded_state_dict};
  Accelerator accelerator(options);
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Dropout(0.2),
                            torch::nn::Linear(8, 2));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  Count count;
  Sender sender;
  auto [model, opt, sched, loader, held] = accelerator.prepare(
      net, optimizer, optim::cosine_schedule_with_warmup(optimizer, 2, 60),
      data::DataLoader(Rows([&] { sender.at("loader", count.steps); }), {.batch_size = kBatch, .shuffle = true}),
      data::DataLoader(std::vector<at::Tensor>(kHeld, torch::ones({4})), {.batch_size = 1}));
  accelerator.register_for_checkpointing(count);
  Ended ended;
  if (resumes) accelerator.load_state();
  ended.first = count.steps;
  const int64_t last = count.steps + micro_steps;
  while (true) {
    net->train();
    for (auto& batch : loader) {
      auto scope = accelerator.accumulate(model);
      accelerator.backward((model(batch) - batch.sum()).pow(2).mean());
      opt.step();
      sched.step();
      opt.zero_grad();
      ++count.steps;
      sender.at(accelerator.gradient_state().end_of_dataloader() ? "last step" : "step", count.steps);
      if (count.steps < last) continue;
      ended.steps = count.steps;
      ended.state = accelerator.get_state_dict(model);
      return ended;
    }
    const torch::NoGradGuard no_grad;
    net->eval();
    ended.evaluations.push_back(0);
    for (auto& batch : held) {
      (void)model(batch);
      ++ended.evaluations.back();
      sender.at("evaluation", count.steps);
    }
  }
}

void in_rank() {
  const PartialState state;
  const fs::path folder = told("SIGNAL_FOLDER");
  if (told("SIGNAL_THEN") == "save") {
    train(folder, 100000);
    FAIL() << "the training was not interrupted";
  }
  const int64_t pass = (kRows / kBatch + support::world_size() - 1) / support::world_size();
  const Ended resumed = train(folder, pass + 3), whole = train(folder / "whole", resumed.steps);
  EXPECT_GE(resumed.first, 3) << "the step in which the signal came is in it";
  if (told("SIGNAL_WHERE") == "evaluation") {
    EXPECT_EQ(resumed.first % pass, 0) << "it is not saved behind the evaluation";
  }
  ASSERT_FALSE(resumed.evaluations.empty());
  EXPECT_EQ(resumed.evaluations.front(), whole.evaluations.front()) << "an evaluation that was cut short goes on";
  EXPECT_EQ(resumed.state.size(), whole.state.size());
  for (const auto& [name, tensor] : resumed.state)
    EXPECT_TRUE(tensor.equal(whole.state.at(name))) << name << ": the resumed run ends elsewhere";
}

std::vector<support::RankResult> run_ranks(const Way& way, const std::string& folder, const std::string& then) {
  const std::string name = std::string("SaveOnSignal.") + testing::UnitTest::GetInstance()->current_test_info()->name();
  support::RankOptions options{.world_size = way.ranks,
                               .env = {{"SIGNAL_THEN", then},
                                       {"SIGNAL_FOLDER", folder},
                                       {"SIGNAL_WHERE", way.where},
                                       {"SIGNAL_WHO", way.who},
                                       {"SIGNAL_NUMBER", std::to_string(way.signal)},
                                       {"SIGNAL_LAYOUT", way.layout},
                                       {"SIGNAL_PRECISION", way.precision},
                                       {"SIGNAL_ACCUMULATION", std::to_string(way.accumulation)},
                                       {"ACCELERATE_SHARED_MEMORY", way.shared_memory}}};
  if (then == "save") options.env.emplace_back("ACCELERATE_RECEIPTS", "1");
  return support::run_test_in_ranks(name, options);
}

/// @return what rank 0 wrote before it ended
std::string expect_saves_and_goes_on(const Way& way) {
  SCOPED_TRACE(testing::Message() << way.ranks << " ranks, signal " << way.signal << " to " << way.who << " in "
                                  << way.where << ", " << way.layout);
  static int ways = 0;
  const fs::path folder = fs::path(support::scratch_dir()) / std::to_string(++ways);
  const auto saved = run_ranks(way, folder, "save");
  for (const auto& result : saved) EXPECT_EQ(result.exit_code, 75) << result.output;
  EXPECT_TRUE(fs::exists(folder / "checkpoints" / "checkpoint_0" / "checkpoint.json"));
  EXPECT_FALSE(fs::exists(folder / "checkpoints" / "checkpoint_1"));
  EXPECT_FALSE(fs::exists(folder / "checkpoints" / "checkpoint_0" / "gradients_0.bin")) << "the step was not finished";
  for (const auto& result : run_ranks(way, folder, "go on")) EXPECT_EQ(result.exit_code, 0) << result.output;
  return saved.front().output;
}

}  // namespace

TEST(SaveOnSignal, AProcessAloneSavesAndGoesOn) {
  if (support::is_rank()) return in_rank();
  EXPECT_THAT(
      expect_saves_and_goes_on({.where = "step", .signal = SIGUSR1}),
      AllOf(HasSubstr("SIGUSR1: saved '"), HasSubstr("the process ends with exit code 75"),
            HasSubstr("project_config.save_on_signal"), HasSubstr("1 checkpoint was saved because of a signal")));
  expect_saves_and_goes_on({.where = "evaluation"});
  // What follows the pass is in it.
  expect_saves_and_goes_on({.where = "last step"});
  // No step ends within the pass.
  expect_saves_and_goes_on({.where = "step", .accumulation = 100});
}

TEST(SaveOnSignal, AllRanksSaveAtOneStepWhoeverHearsTheSignal) {
  if (support::is_rank()) return in_rank();
  expect_saves_and_goes_on({.ranks = 2, .where = "loader", .who = "1", .precision = "bf16", .shared_memory = "0"});
  expect_saves_and_goes_on({.ranks = 2, .where = "evaluation", .who = "all"});
  expect_saves_and_goes_on({.ranks = 3, .where = "step", .who = "2", .layout = "sharded"});
}

TEST(SaveOnSignal, ARankThatComesToNoSavePointSaysSoAndEndsAsBefore) {
  if (support::is_rank()) {
    Accelerator accelerator({.project_config = {.project_dir = support::scratch_dir(),
                                                .automatic_checkpoint_naming = true,
                                                .save_on_signal = true},
                             .kwargs_handlers = {InitProcessGroupKwargs{.timeout = milliseconds(300)}}});
    ::kill(::getpid(), SIGTERM);
    std::this_thread::sleep_for(std::chrono::seconds(60));
    return;
  }
  const auto result = run_ranks({}, "", "").front();
  EXPECT_EQ(result.signal, SIGTERM) << result.output;
  EXPECT_THAT(result.output, HasSubstr("found no save point within 0.3 s of SIGTERM"));
}

TEST(SaveOnSignal, AfterTheTrainingSignalsDoWhatTheyDid) {
  if (support::is_rank()) {
    Accelerator accelerator(
        {.project_config = {
             .project_dir = support::scratch_dir(), .automatic_checkpoint_naming = true, .save_on_signal = true}});
    accelerator.end_training();
    ::kill(::getpid(), SIGTERM);
    std::this_thread::sleep_for(std::chrono::seconds(60));
    return;
  }
  const auto result = run_ranks({}, "", "").front();
  EXPECT_EQ(result.signal, SIGTERM) << result.output;
  EXPECT_THAT(result.output, Not(HasSubstr("save point")));
}

TEST(SaveOnSignal, WhatCannotBeIsRefused) {
  if (support::is_rank()) return;
  AcceleratorState::reset();
  ProjectConfiguration project{.project_dir = support::scratch_dir(), .save_on_signal = true};
  EXPECT_THAT(message_of<ConfigError>([&] { Accelerator({.cpu = true, .project_config = project}); }),
              HasSubstr("without automatic_checkpoint_naming"));
  project.automatic_checkpoint_naming = true;
  ::signal(SIGUSR1, [](int) {});
  EXPECT_THAT(message_of<ConfigError>([&] { Accelerator({.cpu = true, .project_config = project}); }),
              HasSubstr("a handler of the program for SIGUSR1"));
  ::signal(SIGUSR1, SIG_DFL);
  const Accelerator first({.cpu = true, .project_config = project});
  EXPECT_THAT(message_of<ConfigError>([&] { Accelerator({.cpu = true, .project_config = project}); }),
              HasSubstr("another Accelerator of this process"));
}

RANKS_TEST(CallRanks, TheFurthestIsKnownToAll, 3) {
  const PartialState state;
  const auto group = comm::world_group();
  group->answer_calls([] { return 10 * support::rank() + 5; });
  EXPECT_FALSE(group->furthest()) << "nobody has called";
  group->barrier();
  if (support::rank() == 1) group->call_ranks();
  group->wait_until(
      "furthest", [&] { return group->furthest().has_value(); }, false);
  EXPECT_EQ(group->furthest(), 25);
  group->barrier();
}

RANKS_TEST(CallRanks, WhoLeavesHasBeenEverywhere, 2) {
  const PartialState state;
  const auto group = comm::world_group();
  group->answer_calls([] { return 1; });
  group->barrier();
  if (support::rank() == 1) return group->leave();
  group->call_ranks();
  group->wait_until(
      "furthest", [&] { return group->furthest().has_value(); }, false);
  EXPECT_EQ(group->furthest(), std::numeric_limits<int64_t>::max());
}
