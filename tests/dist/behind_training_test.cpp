// save_state() behind training: files are those of a save that waits, whatever is rewritten meanwhile.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>

#include "both_stores.hpp"
#include "formats/checkpoint_manifest.hpp"
#include "fsdp_saving.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "scratch.hpp"
#include "snapshot/counts.hpp"
#include "snapshot/ledger.hpp"

using namespace accelerate;
using snapshot::SnapshotCount;
using support::message_of;
using support::rank;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
namespace dcp = accelerate::distributed_checkpoint;
namespace fs = std::filesystem;
namespace nn = torch::nn;

namespace {

/// While it is closed the writer's thread waits before the first chunk.
class Gate {
 public:
  Gate() {
    snapshot::set_before_read([shared = shared_] {
      std::unique_lock lock(shared->mutex);
      shared->opened.wait(lock, [&] { return shared->open; });
    });
  }
  ~Gate() {
    snapshot::set_before_read(nullptr);
    const std::lock_guard lock(shared_->mutex);
    shared_->open = true;
    shared_->opened.notify_all();
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable opened;
    bool open = false;
  };
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

AcceleratorOptions options_of(const std::string& layout, const ProjectConfiguration& project) {
  AcceleratorState::reset();
  GradientState::reset();
  AcceleratorOptions options{.gradient_accumulation_steps = 2,
                             .cpu = true,
                             .project_config = project,
                             .fsdp_plugin = support::fsdp_saving(layout)};
  if (layout == "ahead")
    options.fsdp_plugin =
        FullyShardedDataParallelPlugin{.state_dict_type = StateDictType::sharded_state_dict, .step_in_backward = true};
  if (layout == "at once")
    options.fsdp_plugin =
        FullyShardedDataParallelPlugin{.state_dict_type = StateDictType::sharded_state_dict, .step_at_once = true};
  if (layout == "bf16") options.mixed_precision = "bf16";
  return options;
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(const std::string& name, const std::vector<at::Tensor>& all) {
  if (name == "adamw") return std::make_unique<torch::optim::AdamW>(all, 0.01);
  if (name == "rmsprop") return std::make_unique<torch::optim::RMSprop>(all, 0.01);
  if (name == "adamw8bit") return std::make_unique<optim::AdamW8bit>(all, optim::AdamW8bitOptions(0.01));
  if (name == "lion") return std::make_unique<optim::Lion>(all, optim::LionOptions(0.01));
  return std::make_unique<torch::optim::SGD>(all, torch::optim::SGDOptions(0.1).momentum(0.9));
}

struct Run {
  explicit Run(const std::string& layout, const std::string& optimizer_name = "sgd",
               const ProjectConfiguration& project = {})
      : accelerator((torch::manual_seed(3), options_of(layout, project))),
        net(nn::Linear(64, 64), nn::BatchNorm1d(64), nn::Linear(64, 64)),
        bare((net->to(layout == "halves" ? at::kBFloat16 : at::kFloat),
              optimizer_of(optimizer_name, net->parameters()))) {
    accelerator.register_for_checkpointing(counter);
  }
  void step() {
    const auto scope = accelerator.accumulate(model);
    accelerator.backward(model(torch::rand({4, 64}).to(dtype)).pow(2).mean());
    optimizer.step(), optimizer.zero_grad();
    counter += 1;
  }
  void steps(int n) {
    for (int i = 0; i < n; ++i) step();
  }

  Accelerator accelerator;
  nn::Sequential net;
  std::unique_ptr<torch::optim::Optimizer> bare;
  at::ScalarType dtype = net->parameters()[0].scalar_type();
  Prepared<nn::Sequential> model = accelerator.prepare(net);
  AcceleratedOptimizer optimizer = accelerator.prepare(*bare);
  int64_t counter = 0;
};

std::map<std::string, std::string> contents_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file() && entry.path().filename() != "checkpoint.json")
      files.emplace(entry.path().lexically_relative(folder).string(), support::text_of(entry.path()));
  return files;
}

void expect_same_files(const fs::path& one, const fs::path& other) {
  const auto expected = contents_of(one), found = contents_of(other);
  std::set<std::string> names, found_names;
  for (const auto& [name, bytes] : expected) names.insert(name);
  for (const auto& [name, bytes] : found) found_names.insert(name);
  ASSERT_EQ(found_names, names);
  for (const auto& [name, bytes] : expected) EXPECT_TRUE(found.at(name) == bytes) << name << " differs";
  const auto first = formats::read_manifest(one), second = formats::read_manifest(other);
  ASSERT_TRUE(first && second);
  EXPECT_EQ(first->files, second->files);
}

}  // namespace

RANKS_TEST(BehindTraining, FilesAreThoseOfASaveThatWaits, 1, 2, 3) {
  const PartialState state({.cpu = true});
  const std::vector<std::pair<std::string, std::string>> jobs{
      {"plain", "sgd"},  {"plain", "adamw"},     {"plain", "rmsprop"}, {"plain", "adamw8bit"},
      {"plain", "lion"}, {"bf16", "sgd"},        {"halves", "sgd"},    {"sharded", "adamw"},
      {"local", "sgd"},  {"sharded", "rmsprop"}, {"ahead", "adamw"},   {"at once", "adamw"}};
  for (const auto& [layout, optimizer] : jobs)
    for (const int before : optimizer == "sgd" ? std::vector{4, 5} : std::vector{4}) {  // 5: in the middle of a group
      const bool all_write = layout == "sharded" || layout == "local" || layout == "ahead" || layout == "at once";
      SCOPED_TRACE(testing::Message() << layout << ", " << optimizer << ", after " << before);
      const auto folder = support::scratch_of_job(layout + optimizer + std::to_string(before));
      at::Tensor alone;
      {
        Run run(layout, optimizer);
        run.steps(before + 4);
        alone = run.net->parameters()[0].detach().clone();
      }
      Run run(layout, optimizer);
      run.steps(before);
      run.accelerator.save_state(folder / "waits");
      counts::reset();
      {
        Gate gate;
        run.accelerator.save_state(folder / "behind", {.behind_training = true});
        EXPECT_FALSE(fs::exists(folder / "behind")) << "it has waited";
        EXPECT_EQ(counts::read(SnapshotCount::kept_bytes), 0) << "copied before a step came";
        run.steps(4);
        if (rank() <= 0 || all_write) EXPECT_GT(counts::read(SnapshotCount::kept_bytes), 0);
        EXPECT_LE(counts::read(SnapshotCount::kept_bytes), counts::read(SnapshotCount::state_bytes));
      }
      run.accelerator.wait_for_checkpoint();
      expect_same_files(folder / "waits", folder / "behind");
      EXPECT_TRUE(run.net->parameters()[0].detach().equal(alone)) << "the save has changed the training";
      run.accelerator.load_state(folder / "behind");
      EXPECT_EQ(run.counter, before);
    }
}

RANKS_TEST(BehindTraining, TheMarkCopiesNextToNothing, 1, 2) {
  AcceleratorState::reset();
  const auto folder = support::scratch_of_job("folder");
  Accelerator accelerator({.cpu = true});
  nn::Linear net(500, 500);
  torch::optim::AdamW bare(net->parameters(), 0.01);
  auto [model, optimizer] = accelerator.prepare(net, bare);
  accelerator.backward(model(torch::rand({2, 500})).sum());
  optimizer.step(), optimizer.zero_grad();
  counts::reset();
  accelerator.save_state(folder / "one", {.behind_training = true});
  // Of all ranks, which share out what is written.
  const auto of_all = [](SnapshotCount count) {
    const auto each = gather_object(std::vector<int64_t>{counts::read(count)});
    return std::accumulate(each.begin(), each.end(), int64_t{0});
  };
  const auto state = of_all(SnapshotCount::state_bytes), copied = of_all(SnapshotCount::copied_bytes);
  EXPECT_GE(state, 3 * 4 * 500 * 500);
  EXPECT_LE(state, 4 * 4 * 500 * 500);
  EXPECT_LE(100 * copied, state);
  accelerator.end_training();
  EXPECT_TRUE(fs::exists(folder / "one" / "checkpoint.json"));
  const auto receipts = accelerator.receipts();
  EXPECT_THAT(receipts["save_state.behind_training"].effect,
              AllOf(HasSubstr("1 mark"), HasSubstr("kept by steps"), HasSubstr("ms waited")));
}

RANKS_TEST(BehindTraining, WhatTheProgramRewritesFailsTheSaveOnAllRanks, 1, 2) {
  // Of one rank parameters lie in its shards; of several see below.
  for (const std::string layout : support::world_size() == 1 ? std::vector{"plain", "local"} : std::vector{"plain"}) {
    SCOPED_TRACE(layout);
    const auto folder = support::scratch_of_job(layout);
    Run run(layout);
    run.steps(2);
    run.accelerator.save_state(folder);
    const auto before = contents_of(folder);
    run.accelerator.wait_for_everyone();  // no rank saves again while another one reads
    {
      Gate gate;
      run.accelerator.save_state(folder, {.behind_training = true});
      const at::NoGradGuard no_grad;
      if (rank() <= 0) run.net->parameters()[0].mul_(2);
    }
    EXPECT_THAT(message_of<CheckpointError>([&] { run.accelerator.load_state(folder); }),
                AllOf(HasSubstr("was changed behind the save"), HasSubstr("0.weight")));
    run.accelerator.wait_for_checkpoint();  // it was reported
    run.accelerator.wait_for_everyone();    // rank 0 has removed what it had written
    EXPECT_TRUE(contents_of(folder) == before) << "the older checkpoint was touched";
    run.accelerator.save_state(folder, {.behind_training = true});
    run.accelerator.load_state(folder);
  }
}

// Whoever brings them to this rank's shards keeps what is there.
RANKS_TEST(BehindTraining, WritesToShardedParametersAreKept, 2, 3) {
  support::on_both_stores([](const std::string& store) {
    SCOPED_TRACE(store);
    const auto folder = support::scratch_of_job(store);
    Run run("local");
    run.steps(2);
    run.accelerator.save_state(folder / "waits");
    {
      Gate gate;
      run.accelerator.save_state(folder / "behind", {.behind_training = true});
      {
        const at::NoGradGuard no_grad;
        run.net->parameters()[0].mul_(2);
      }
      run.steps(2);
    }
    run.accelerator.wait_for_checkpoint();
    expect_same_files(folder / "waits", folder / "behind");
  });
}

// Weights are read into the tensors that the save has yet to read.
RANKS_TEST(BehindTraining, WeightsThatAStateDictReplacesAreKept, 1, 2) {
  const auto folder = support::scratch_of_job("set");
  const nn::Sequential other(nn::Linear(64, 64), nn::BatchNorm1d(64), nn::Linear(64, 64));
  Run run("plain");
  run.steps(2);
  run.accelerator.save_state(folder / "waits");
  {
    Gate gate;
    run.accelerator.save_state(folder / "behind", {.behind_training = true});
    dcp::set_model_state_dict(run.model, dcp::get_model_state_dict(other));
    EXPECT_TRUE(run.net->parameters()[0].equal(other->parameters()[0]));
  }
  run.accelerator.wait_for_checkpoint();
  expect_same_files(folder / "waits", folder / "behind");
}

RANKS_TEST(BehindTraining, AFileThatCantBeWrittenFailsTheSaveOnAllRanks, 1, 2) {
  const auto folder = support::scratch_of_job("folder");
  Run run("sharded");
  run.steps(2);
  {
    Gate gate;
    run.accelerator.save_state(folder / "one", {.behind_training = true});
    run.accelerator.wait_for_everyone();
    if (rank() <= 0) fs::rename(folder / ".one.unfinished", folder / "taken away");
    run.accelerator.wait_for_everyone();
  }
  EXPECT_THAT(message_of<CheckpointError>([&] { run.accelerator.save_state(folder / "two"); }),
              AllOf(HasSubstr("the checkpoint was not written"),
                    AnyOf(HasSubstr("can't create it"), HasSubstr("can't rename"))));
  EXPECT_FALSE(fs::exists(folder / "one") || fs::exists(folder / "two"));
  run.accelerator.save_state(folder / "two");
  EXPECT_TRUE(fs::exists(folder / "two" / "checkpoint.json"));
}

RANKS_TEST(BehindTraining, WhatCantBeReadLaterIsRefused, 2) {
  const auto folder = support::scratch_of_job("folder");
  Run run("full");
  EXPECT_THAT(message_of<ConfigError>([&] { run.accelerator.save_state(folder, {.behind_training = true}); }),
              AllOf(HasSubstr("behind_training"), HasSubstr("SHARDED_STATE_DICT")));
  EXPECT_FALSE(fs::exists(folder / "checkpoint.json"));
  run.accelerator.save_state(folder);
  EXPECT_TRUE(fs::exists(folder / "checkpoint.json"));

  Run first("plain");
  Accelerator second({.cpu = true});
  {
    Gate gate;
    first.accelerator.save_state(folder, {.behind_training = true});
    EXPECT_THAT(message_of<ConfigError>([&] { second.save_state(folder / "second"); }), HasSubstr("one at a time"));
  }
  first.accelerator.wait_for_checkpoint();
  second.save_state(folder / "second");
}

RANKS_TEST(BehindTraining, AutomaticNamesAndTheLimitActWhenItIsComplete, 1, 2) {
  const auto folder = support::scratch_of_job("folder");
  Run run("plain", "sgd", {.project_dir = folder, .automatic_checkpoint_naming = true, .total_limit = 2});
  for (int i = 0; i < 4; ++i) {
    run.steps(2);
    run.accelerator.save_state({}, {.behind_training = true});
  }
  run.accelerator.wait_for_checkpoint();
  run.accelerator.wait_for_everyone();
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder / "checkpoints"))
    names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"checkpoint_2", "checkpoint_3"}));
  run.accelerator.load_state();
  EXPECT_EQ(run.counter, 8);
}
