// checkpoint.json: it lists every file of every rank, and what is not as it was written is not loaded.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "formats/checkpoint_manifest.hpp"
#include "fsdp_saving.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "scratch.hpp"
#include "variable.hpp"
#include "warnings_of.hpp"
#include "zero_training.hpp"

using namespace accelerate;
using support::message_of;
using support::rank;
using support::world_size;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;
namespace nn = torch::nn;

namespace {

AcceleratorOptions options_of(const std::string& layout, const ProjectConfiguration& project) {
  AcceleratorState::reset();
  GradientState::reset();
  return {.gradient_accumulation_steps = 2,
          .cpu = true,
          .project_config = project,
          .fsdp_plugin = support::fsdp_saving(layout)};
}

/// A run with all kinds of files.
struct Run {
  explicit Run(const std::string& layout, const ProjectConfiguration& project = {}, int64_t width = 6)
      : accelerator(options_of(layout, project)), net(nn::Linear(width, width), nn::BatchNorm1d(width)) {
    accelerator.register_for_checkpointing(counter);
    hook = accelerator.register_save_state_pre_hook([](const fs::path& folder) {
      if (rank() <= 0) std::ofstream(folder / "notes.txt") << "by a hook, of which nobody else knows";
    });
  }
  /// A micro-step: two are a group.
  void step() {
    const auto scope = accelerator.accumulate(model);
    const int64_t width = net->parameters()[0].size(-1);
    accelerator.backward(model(torch::rand({3, width})).pow(2).mean());
    optimizer.step(), schedule.step(), optimizer.zero_grad();
  }

  Accelerator accelerator;
  nn::Sequential net;
  torch::optim::SGD sgd{net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5)};
  Prepared<nn::Sequential> model = accelerator.prepare(net);
  AcceleratedOptimizer optimizer = accelerator.prepare(sgd);
  AcceleratedScheduler schedule = accelerator.prepare(optim::constant_schedule_with_warmup(sgd, 4));
  int64_t counter = 0;
  Scope hook;
};

std::set<std::string> files_below(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) names.insert(entry.path().lexically_relative(folder).generic_string());
  return names;
}

FileChecksums checksums_of(const fs::path& file) {
  ChecksumsInTurn sums;
  sums.add(support::text_of(file));
  return sums.take();
}

void flip(const fs::path& file, uint64_t bit) {
  std::fstream both(file, std::ios::in | std::ios::out | std::ios::binary);
  both.seekg(static_cast<int64_t>(bit / 8));
  const char flipped = static_cast<char>(both.get() ^ 1 << bit % 8);
  both.seekp(static_cast<int64_t>(bit / 8));
  both.put(flipped);
}

/// By rank 0, when all have come so far; then all go on.
void on_disk(const Accelerator& accelerator, const std::function<void()>& change) {
  accelerator.wait_for_everyone();
  if (accelerator.is_main_process()) change();
  accelerator.wait_for_everyone();
}

/// One bit of each file after the other is another one, and it is named.
void expect_guarded(Accelerator& accelerator, const fs::path& folder) {
  std::mt19937 random(5);
  for (const auto& name : files_below(folder)) {
    const uint64_t bit = random() % (8 * fs::file_size(folder / name));
    on_disk(accelerator, [&] { flip(folder / name, bit); });
    EXPECT_THAT(message_of<CheckpointError>([&] { accelerator.load_state(folder); }),
                HasSubstr(fs::path(name).filename().string()))
        << "bit " << bit << " of " << name;
    on_disk(accelerator, [&] { flip(folder / name, bit); });
  }
  accelerator.load_state(folder);
}

}  // namespace

RANKS_TEST(Manifest, ListsAndGuardsEveryFile, 1, 2) {
  const PartialState state({.cpu = true});
  for (const std::string layout : {"safetensors", "sharded", "full", "local"}) {
    SCOPED_TRACE(layout);
    const auto folder = support::scratch(layout);
    auto run = std::make_unique<Run>(layout, ProjectConfiguration{.iteration = 7});
    for (int i = 0; i < 5; ++i) run->step();
    run->accelerator.save_state(folder);  // in the middle of a group
    const auto manifest = formats::read_manifest(folder);
    ASSERT_TRUE(manifest);
    auto files = files_below(folder);
    for (int64_t r = 0; r < world_size(); ++r) {
      EXPECT_TRUE(files.contains("gradients_" + std::to_string(r) + ".bin"));
      EXPECT_TRUE(files.contains("random_states_" + std::to_string(r) + ".pkl"));
    }
    EXPECT_EQ(files.erase("checkpoint.json"), 1U);
    std::set<std::string> listed;
    for (const auto& [name, sums] : manifest->files) {
      listed.insert(name);
      EXPECT_EQ(sums, checksums_of(folder / name)) << name;
    }
    EXPECT_EQ(listed, files);
    EXPECT_EQ(manifest->world_size, world_size());
    EXPECT_EQ(manifest->layout, layout);
    EXPECT_EQ(manifest->step, 2);
    EXPECT_EQ(manifest->iteration, 7);
    EXPECT_EQ(manifest->accelerate, ACCELERATE_VERSION);
    EXPECT_EQ(manifest->libtorch, TORCH_VERSION);
    expect_guarded(run->accelerator, folder);
    run.reset();
    Run again(layout);
    again.accelerator.load_state(folder);
    again.step();
    again.accelerator.save_state(folder);
    EXPECT_EQ(formats::read_manifest(folder)->step, 3) << "a run that goes on counts on";
  }
}

RANKS_TEST(Manifest, GuardsDeepSpeedsFiles, 2) {
  for (const int64_t stage : {2, 3}) {
    AcceleratorState::reset();
    GradientState::reset();
    const support::json config{{"zero_optimization", {{"stage", stage}}}, {"optimizer", {{"type", "Adam"}}}};
    support::Training training(config);
    training.steps(1);
    const auto folder = support::scratch(std::to_string(stage));
    training.accelerator.save_state(folder);
    EXPECT_EQ(formats::read_manifest(folder)->layout, "deepspeed");
    EXPECT_EQ(formats::read_manifest(folder)->files.size() + 1, files_below(folder).size());
    expect_guarded(training.accelerator, folder);
  }
}

RANKS_TEST(Manifest, ACopyInPartIsPassedOver, 2) {
  const PartialState state({.cpu = true});
  for (const std::string layout : {"safetensors", "sharded"}) {
    const auto project = support::scratch(layout), all = project / "checkpoints", copy = project / "copy";
    Run run(layout, {.project_dir = project, .automatic_checkpoint_naming = true});
    for (run.counter = 0; run.counter < 2; ++run.counter) run.step(), run.step(), run.accelerator.save_state();
    on_disk(run.accelerator, [&] { fs::copy(all / "checkpoint_1", copy, fs::copy_options::recursive); });
    const auto cut = [](const fs::path& file) { fs::resize_file(file, fs::file_size(file) / 2); };
    std::vector<std::pair<std::string, std::function<void(const fs::path&)>>> damages{
        {"random_states_1.pkl", [](const fs::path& file) { fs::remove(file); }},
        {"notes.txt", cut},
        {"checkpoint.json", cut}};
    if (layout == "sharded") damages.emplace_back("optimizer_0/__1_0.distcp", [](const fs::path& f) { fs::remove(f); });
    else damages.emplace_back("optimizer.bin", cut);
    for (const auto& [name, damage] : damages) {
      SCOPED_TRACE(layout + " " + name);
      on_disk(run.accelerator, [&, &name = name, &damage = damage] { damage(all / "checkpoint_1" / name); });
      const auto said = support::warnings_of([&] { run.accelerator.load_state(); });
      EXPECT_EQ(run.counter, 0);
      if (rank() == 0) {
        EXPECT_THAT(said, AllOf(HasSubstr("checkpoint_1', which has no " + name),
                                HasSubstr("checkpoint_0', the newest checkpoint that is complete")));
      }
      EXPECT_THAT(message_of<CheckpointError>([&] { run.accelerator.load_state(all / "checkpoint_1"); }),
                  HasSubstr(name));
      on_disk(run.accelerator, [&] {
        fs::remove_all(all / "checkpoint_1");
        fs::copy(copy, all / "checkpoint_1", fs::copy_options::recursive);
      });
      run.accelerator.load_state();
      EXPECT_EQ(run.counter, 1);
    }
    // Without the list nobody knows what else there was.
    on_disk(run.accelerator, [&] {
      for (const char* name : {"random_states_1.pkl", "notes.txt", "checkpoint.json"})
        fs::remove(all / "checkpoint_1" / name);
    });
    run.counter = 5;
    EXPECT_THAT(support::warnings_of([&] { run.accelerator.load_state(); }),
                HasSubstr(rank() == 1 ? "keep their present state" : ""));
    EXPECT_EQ(run.counter, 1);
  }
}

// Parts are 4 MB: the first and the last of these files are read before the tensor is.
RANKS_TEST(Manifest, TheTensorIsNamed, 1) {
  const auto folder = support::scratch("large");
  Run run("safetensors", {}, 1500);
  run.step(), run.step();
  run.counter = 4;
  run.accelerator.save_state(folder);
  run.counter = 5;
  const uint64_t bit = 8 * 5'000'000;
  flip(folder / "model.safetensors", bit);
  EXPECT_THAT(message_of<CheckpointError>([&] { run.accelerator.load_state(folder); }),
              AllOf(HasSubstr("tensor '0.weight'"),
                    HasSubstr("model.safetensors' is damaged: bytes 4194304 to 8388607"), HasSubstr("are undefined")));
  EXPECT_EQ(run.counter, 5) << "what is no tensor of weights or optimizers is as it was";
  flip(folder / "model.safetensors", bit);
  flip(folder / "optimizer.bin", bit);
  EXPECT_THAT(message_of<CheckpointError>([&] { run.accelerator.load_state(folder); }),
              AllOf(HasSubstr("'momentum_buffer' of parameter '0'"), HasSubstr("optimizer.bin' is damaged")));
  // What is undefined is not saved, until it has been loaded.
  EXPECT_THAT(message_of<CheckpointError>([&] { run.accelerator.save_state(support::scratch("undefined")); }),
              AllOf(HasSubstr("loading '" + folder.string() + "' failed in the middle"), HasSubstr("undefined")));
  EXPECT_FALSE(fs::exists(support::scratch("undefined")));
  flip(folder / "optimizer.bin", bit);
  run.accelerator.load_state(folder);
  EXPECT_EQ(run.counter, 4);
  run.accelerator.save_state(support::scratch("undefined"));
}

namespace {

/// Where records of torch.save's archives begin in a file, by their names: the first of each that has bytes.
std::map<std::string, uint64_t> records_in(const fs::path& file) {
  const auto bytes = support::text_of(file);
  const auto number = [&](size_t at) {
    return static_cast<size_t>(static_cast<uint8_t>(bytes[at]) | static_cast<uint8_t>(bytes[at + 1]) << 8);
  };
  std::map<std::string, uint64_t> found;
  for (size_t at = bytes.find("PK\3\4"); at != std::string::npos; at = bytes.find("PK\3\4", at + 4)) {
    const auto name = bytes.substr(at + 30, number(at + 26));
    const size_t begin = at + 30 + number(at + 26) + number(at + 28);
    if (bytes.compare(begin, 2, "PK") == 0) continue;  // of no bytes, as a rank's part may be: what follows begins
    for (const char* wanted : {"data.pkl", "data/0"})
      if (name.ends_with(wanted)) found.emplace(wanted, begin);
  }
  return found;
}

}  // namespace

// As Python's folders, and ours of before: what archives of torch.save say of their own records is all that is known.
RANKS_TEST(Manifest, WithoutAListArchivesAreGuardedByTheirOwnChecksums, 1, 2) {
  const PartialState state({.cpu = true});
  for (const std::string layout : {"safetensors", "sharded", "full", "local"}) {
    SCOPED_TRACE(layout);
    const auto folder = support::scratch(layout + " of before");
    Run run(layout);
    run.step(), run.step();
    run.accelerator.save_state(folder);
    on_disk(run.accelerator, [&] { fs::remove(folder / "checkpoint.json"); });
    int64_t archives = 0;
    for (const auto& name : files_below(folder)) {
      const auto records = records_in(folder / name);
      archives += records.empty() ? 0 : 1;
      for (const auto& [record, begin] : records) {
        on_disk(run.accelerator, [&, begin = begin] { flip(folder / name, 8 * begin + 3); });
        EXPECT_THAT(
            message_of<CheckpointError>([&] { run.accelerator.load_state(folder); }),
            AllOf(HasSubstr(fs::path(name).filename().string()), HasSubstr("record '" + record + "'"),
                  HasSubstr(name == "optimizer.bin" && record == "data/0" ? "'momentum_buffer' of parameter" : "")))
            << name;
        on_disk(run.accelerator, [&, begin = begin] { flip(folder / name, 8 * begin + 3); });
      }
    }
    EXPECT_GE(archives, 3);
    run.accelerator.load_state(folder);
  }
}

RANKS_TEST(Manifest, IsNotLookedAtWhereItIsSwitchedOff, 2) {
  const PartialState state({.cpu = true});
  const auto folder = support::scratch("off");
  const auto damaged = [&](Run& run) {
    run.step(), run.step();
    run.accelerator.save_state(folder);
    on_disk(run.accelerator,
            [&] { flip(folder / "model.safetensors", 8 * fs::file_size(folder / "model.safetensors") - 9); });
  };
  {
    Run run("safetensors", {.verify_checkpoints = false});
    damaged(run);
    run.accelerator.load_state(folder);
    on_disk(run.accelerator, [&] {
      fs::rename(folder / "checkpoint.json", folder / "list");
      flip(folder / "optimizer.bin", 8 * records_in(folder / "optimizer.bin").at("data/0"));
    });
    run.accelerator.load_state(folder);
    on_disk(run.accelerator, [&] {
      flip(folder / "optimizer.bin", 8 * records_in(folder / "optimizer.bin").at("data/0"));
      fs::rename(folder / "list", folder / "checkpoint.json");
    });
    // Sizes are, in any case.
    on_disk(run.accelerator, [&] { fs::resize_file(folder / "notes.txt", 3); });
    EXPECT_THAT(message_of<CheckpointError>([&] { run.accelerator.load_state(folder); }),
                HasSubstr("notes.txt of 37 bytes, as it was written (it has 3)"));
  }
  const support::Variable off("ACCELERATE_VERIFY_CHECKPOINTS", "0");
  {
    Run run("safetensors");
    damaged(run);
    run.accelerator.load_state(folder);
  }
  Run run("safetensors", {.verify_checkpoints = true});
  damaged(run);
  EXPECT_THAT(message_of<CheckpointError>([&] { run.accelerator.load_state(folder); }),
              HasSubstr("model.safetensors' is damaged"));
}

RANKS_TEST(Manifest, AHooksFileOfItsNameIsRefused, 2) {
  const auto folder = support::scratch("hook");
  Run run("safetensors");
  run.hook = run.accelerator.register_save_state_pre_hook([](const fs::path& unfinished) {
    if (rank() == 0) std::ofstream(unfinished / "checkpoint.json") << "{}";
  });
  EXPECT_THAT(message_of<Error>([&] { run.accelerator.save_state(folder); }),
              HasSubstr("a hook has written a file 'checkpoint.json'"));
  EXPECT_FALSE(fs::exists(folder));
  run.hook = Scope();
  run.accelerator.save_state(folder);
  // Another's file of this name, in a folder of before, is none of ours.
  on_disk(run.accelerator, [&] { support::write(folder / "checkpoint.json", R"({"mine": 3})"); });
  run.accelerator.load_state(folder);
  EXPECT_THAT(message_of<Error>([&] { run.accelerator.save_state(folder); }),
              HasSubstr("checkpoint.json' of another kind"));
  EXPECT_EQ(support::text_of(folder / "checkpoint.json"), R"({"mine": 3})");
}

// Weights that `accelerate merge-weights --remove_checkpoint_dir` has taken out of a checkpoint are no longer asked
// for.
RANKS_TEST(Manifest, WhatMergingRemovesIsForgotten, 2) {
  const auto folder = support::scratch("merged");
  Run run("sharded");
  run.step(), run.step();
  run.accelerator.save_state(folder);
  merge_fsdp_weights(folder / "pytorch_model_fsdp_0", folder, {.remove_checkpoint_dir = true});
  EXPECT_FALSE(fs::exists(folder / "pytorch_model_fsdp_0"));
  run.accelerator.load_state(folder);
  on_disk(run.accelerator, [&] { flip(folder / "optimizer_0" / "__0_0.distcp", 800); });
  EXPECT_THROW(run.accelerator.load_state(folder), CheckpointError);
}
