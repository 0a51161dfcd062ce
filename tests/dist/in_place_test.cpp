// load_state reads into the tensors that are there: it takes no memory of its own, and reads of files what a rank
// holds.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "both_stores.hpp"
#include "counting_allocator.hpp"
#include "fsdp_saving.hpp"
#include "ranks.hpp"
#include "run_state/counts.hpp"
#include "run_state/filling.hpp"
#include "scratch.hpp"

using namespace accelerate;
using support::on_both_stores;
using support::reset_states;
namespace fs = std::filesystem;
namespace nn = torch::nn;

namespace {

AcceleratorOptions options_of(const std::string& layout) {
  reset_states();
  return {.cpu = true, .project_config = {.verify_checkpoints = false}, .fsdp_plugin = support::fsdp_saving(layout)};
}

constexpr int64_t kLayers = 4;

/// Layers whose weights have width * width / 2 elements.
struct Run {
  Run(const std::string& layout, int64_t width) : accelerator(options_of(layout)), width(width), layout(layout) {
    for (int64_t i = 0; i < kLayers / 2; ++i)
      net->push_back(nn::Linear(width, width / 2)), net->push_back(nn::Linear(width / 2, width));
    sgd.emplace(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
    model.emplace(accelerator.prepare(net));
    optimizer.emplace(accelerator.prepare(*sgd));
  }
  void step() {
    accelerator.backward((*model)(torch::rand({2, width})).pow(2).mean());
    optimizer->step(), optimizer->zero_grad();
  }
  void save(const fs::path& folder) { accelerator.save_state(folder, layout != "archive"); }
  /// Weights and momentum as this rank holds them.
  std::vector<at::Tensor> held() {
    std::vector<at::Tensor> all;
    for (const auto& group : optimizer->param_groups())
      for (const auto& parameter : group.params()) {
        all.push_back(parameter.detach());
        if (const auto state = optimizer->state().find(parameter.unsafeGetTensorImpl());
            state != optimizer->state().end())
          all.push_back(static_cast<torch::optim::SGDParamState&>(*state->second).momentum_buffer());
      }
    return all;
  }
  int64_t bytes() {
    int64_t bytes = 0;
    for (const auto& tensor : held()) bytes += static_cast<int64_t>(tensor.nbytes());
    return bytes;
  }

  Accelerator accelerator;
  int64_t width;
  std::string layout;
  nn::Sequential net;
  std::optional<torch::optim::SGD> sgd;
  std::optional<Prepared<nn::Sequential>> model;
  std::optional<AcceleratedOptimizer> optimizer;
};

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const auto& tensor : tensors) copies.push_back(tensor.clone());
  return copies;
}

}  // namespace

RANKS_TEST(InPlace, TakesNoMemoryOfItsOwn, 1, 2) {
  constexpr int64_t kWidth = 512, kWeight = kWidth * kWidth / 2 * 4;
  auto& memory = support::CountingAllocator::install();
  on_both_stores([&](const std::string& store) {
    for (const std::string layout : {"safetensors", "archive", "full", "sharded", "local"}) {
      SCOPED_TRACE(store + ", " + layout);
      Run run(layout, kWidth);
      run.step();
      const auto folder = support::scratch(layout + store.back());
      run.save(folder);
      const auto saved = copies_of(run.held());
      run.step();
      const auto there = run.held();
      std::vector<int64_t> versions;
      for (const auto& tensor : there) versions.push_back(tensor._version());

      const int64_t before = memory.live();
      memory.reset_peak();
      run.accelerator.load_state(folder);
      // Parts of a model that comes and goes are read one at a time, the rest goes where it is.
      const bool in_pieces = layout != "safetensors" && layout != "archive";
      EXPECT_LE(memory.peak() - before, (in_pieces ? kWeight : kWeight / 2) + (128 << 10));

      const auto now = run.held();
      ASSERT_EQ(now.size(), there.size());
      for (size_t i = 0; i < now.size(); ++i) {
        EXPECT_TRUE(now[i].equal(saved[i])) << i;
        if (!in_pieces) {
          EXPECT_EQ(now[i].data_ptr(), there[i].data_ptr()) << i;
        }
        if (now[i].numel() > 0) {
          EXPECT_GT(now[i]._version(), versions[i]) << i << ": who compares versions takes it for unchanged";
        }
      }
    }
  });
}

// Units become whole one after the other within a file, too.
RANKS_TEST(InPlace, SavingAModelHoldsAUnitAtATime, 1, 2, 3) {
  constexpr int64_t kUnits = 12, kWidth = 256, kUnit = kWidth * kWidth * 4;
  auto& memory = support::CountingAllocator::install();
  on_both_stores([&](const std::string& store) {
    for (const bool safe : {true, false}) {
      SCOPED_TRACE(store + (safe ? ", safetensors" : ", archive"));
      reset_states();
      auto plugin = *support::fsdp_saving("sharded");
      plugin.auto_wrap_policy = AutoWrapPolicy::size_based_wrap, plugin.min_num_params = kWidth * kWidth;
      Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin});
      nn::Sequential net;
      for (int64_t i = 0; i < kUnits; ++i) net->push_back(nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false)));
      const auto model = accelerator.prepare(net);
      const auto folder = support::scratch("weights" + store.back() + std::to_string(safe));
      const int64_t before = memory.live();
      memory.reset_peak();
      accelerator.save_model(model, folder, "10GB", safe);
      // This rank's piece of a unit, and on rank 0 the unit, which pieces come straight into.
      EXPECT_LE(memory.peak() - before, kUnit / support::world_size() + (support::rank() == 0 ? kUnit : 0) + (8 << 10));
      const auto expected = accelerator.get_state_dict(model);
      if (support::rank() != 0) continue;
      const auto saved = load_checkpoint_files(folder);
      EXPECT_EQ(saved.size(), static_cast<size_t>(kUnits));
      for (const auto& [name, tensor] : saved) EXPECT_TRUE(tensor.equal(expected.at(name))) << name;
    }
  });
}

RANKS_TEST(InPlace, EachRankReadsWhatItHolds, 1, 2, 3) {
  const std::vector<std::pair<std::string, std::string>> saved_and_loaded{
      {"safetensors", "safetensors"}, {"archive", "archive"},     {"full", "full"},
      {"sharded", "sharded"},         {"safetensors", "sharded"}, {"sharded", "safetensors"}};
  for (const auto& [saved, loaded] : saved_and_loaded) {
    SCOPED_TRACE(saved + " into " + loaded);
    constexpr int64_t kWidth = 1024;
    const auto folder = support::scratch(saved + loaded);
    {
      Run run(saved, kWidth);
      run.step();
      run.save(folder);
    }
    Run run(loaded, kWidth);
    const int64_t before = counts::read(run_state::CheckpointCount::bytes_read);
    run.accelerator.load_state(folder);
    const int64_t read = counts::read(run_state::CheckpointCount::bytes_read) - before;
    EXPECT_GE(read, run.bytes());
    EXPECT_LE(read, run.bytes() + run.bytes() / 50);
  }
}

RANKS_TEST(InPlace, ReadsInTheOrderOfTheDisk, 1) {
  std::vector<std::string> order;
  run_state::Filling filling("files");
  const auto add = [&](const std::string& name, const std::string& file, int64_t begin) {
    checkpointing::StoredTensor stored{
        .dtype = at::kFloat, .sizes = {2}, .bytes = std::nullopt, .read = {}, .read_whole = {}};
    stored.find = [&order, name, file, begin](const formats::DcpBox&) {
      return formats::FoundPart{file, begin, [&order, name](const at::Tensor& to) {
                                  order.push_back(name);
                                  to.fill_(1);
                                }};
    };
    const at::Tensor to = torch::zeros({2});
    filling.add(name, stored, run_state::whole_on_all_ranks({name}, to), to);
    return to;
  };
  const std::vector<at::Tensor> filled{add("third", "b", 7), add("first", "a", 9), add("fourth", "b", 30),
                                       add("second", "b", 5)};
  EXPECT_TRUE(order.empty());
  filling.run();
  EXPECT_THAT(order, testing::ElementsAre("first", "second", "third", "fourth"));
  for (const auto& tensor : filled) EXPECT_TRUE(tensor.eq(1).all().item<bool>());
}

RANKS_TEST(InPlace, NumbersOfAnotherTypeTakeSomeMegabytes, 1) {
  const auto values = torch::rand({3072, 1024});
  const auto folder = support::scratch("types");
  fs::create_directories(folder);
  save_safetensors(folder / "w", {{"w", values}});
  const auto stored = checkpointing::open_safetensors(folder / "w").at("w");
  auto& memory = support::CountingAllocator::install();
  for (const bool turned : {false, true}) {
    const auto all = turned ? torch::zeros({1000, 3000}, at::kBFloat16) : torch::zeros({3000, 1000}, at::kBFloat16);
    const auto to = turned ? all.t() : all;
    const int64_t before = memory.live();
    memory.reset_peak();
    stored.read({{50, 20}, {3000, 1000}}, to);
    EXPECT_LT(memory.peak() - before, 9 << 20);
    EXPECT_TRUE(to.equal(values.narrow(0, 50, 3000).narrow(1, 20, 1000).to(at::kBFloat16)));
  }
}
