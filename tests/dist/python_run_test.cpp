/// A run of Accelerate in Python stops in the middle of a pass and goes on here, and back there, as if it had never
/// stopped: weights, AdamW, schedule, position, and the generators of dropout on each rank.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "accelerate/accelerate.hpp"
#include "accelerate/models/auto_model.hpp"
#include "python.hpp"
#include "ranks.hpp"

namespace {

using namespace accelerate;
namespace fs = std::filesystem;

constexpr int64_t kSteps = 6, kHalf = 3, kTokens = 6, kBatch = 2, kRanks = 2;

struct Progress {
  int64_t steps = 0;
  c10::IValue state_dict() const {
    c10::impl::GenericDict state(c10::StringType::get(), c10::IntType::get());
    state.insert("steps", steps);
    return state;
  }
  void load_state_dict(const c10::IValue& state) { steps = state.toGenericDict().at("steps").toInt(); }
};

at::Tensor loss_of(bool bert, const at::Tensor& logits, const at::Tensor& rows) {
  if (bert) return torch::cross_entropy_loss(logits, rows.select(1, kTokens));
  return torch::cross_entropy_loss(logits.slice(1, 0, -1).flatten(0, 1), rows.slice(1, 1, kTokens).flatten());
}

nlohmann::json read_json(const fs::path& file) {
  std::ifstream in(file);
  return nlohmann::json::parse(in);
}

/// In the ranks: goes on from `python`, and saves `ours` a step before the end.
TEST(PythonRunJob, DISABLED_GoesOn) {
  const fs::path folder = std::getenv("JOB_FOLDER");
  const auto name = folder.filename().string();
  const bool bert = name.starts_with("bert"), sharded = name.ends_with("fsdp2");
  std::optional<FullyShardedDataParallelPlugin> plugin;
  if (sharded) plugin = FullyShardedDataParallelPlugin{.state_dict_type = StateDictType::sharded_state_dict};
  Accelerator accelerator({.cpu = true, .fsdp_plugin = plugin});
  torch::manual_seed(1000 + support::rank());
  const auto model = models::AutoModel::from_config(folder);
  torch::optim::AdamW optimizer(model.module()->parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0.1));
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < kSteps * kBatch * kRanks; ++i)
    rows.push_back(torch::cat({(7 * i + 3 * torch::arange(kTokens)) % 20, torch::full({1}, i % 2, at::kLong)}));
  // A loader with a generator of its own draws nothing from the one that dropout draws from, as in Python.
  auto [m, opt, loader, sched] =
      accelerator.prepare(model, optimizer, data::DataLoader(rows, {.batch_size = kBatch, .seed = 1}),
                          optim::linear_schedule_with_warmup(optimizer, 4, 2 * kRanks * kSteps));
  Progress progress;
  accelerator.register_for_checkpointing(progress);
  accelerator.load_state(folder / "python");
  ASSERT_EQ(progress.steps, kHalf);
  const auto losses =
      read_json(folder / ("losses_" + std::to_string(support::rank()) + ".json"))["losses"].get<std::vector<double>>();
  for (auto& batch : accelerator.skip_first_batches(loader, kHalf)) {
    auto step = accelerator.accumulate(m);
    const models::AutoModel::Tensors inputs{{"input_ids", batch.slice(1, 0, kTokens)}};
    const auto loss = loss_of(bert, m(inputs).at("logits"), batch);
    accelerator.backward(loss);
    opt.step();
    sched.step();
    opt.zero_grad();
    EXPECT_NEAR(loss.item<double>(), losses.at(static_cast<size_t>(progress.steps)), 1e-5) << progress.steps;
    if (++progress.steps == kSteps - 1) accelerator.save_state(folder / "ours");
  }
  EXPECT_EQ(progress.steps, kSteps);
}

TEST(PythonRun, GoesOnHereAndBackThere) {
  if (support::is_rank()) return;
  SKIP_WITHOUT_PYTHON();
  const fs::path base = fs::path(support::scratch_dir()) / "runs";
  fs::create_directories(base);
  const auto python = [&](const char* mode) {
    const auto result = support::run_python("tests/dist/python_run_peer.py", {mode, base.string()});
    EXPECT_EQ(result.exit_code, 0) << result.output;
  };
  python("first");
  for (const char* name : {"gpt2_ddp", "gpt2_fsdp2", "bert_ddp", "bert_fsdp2"}) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(fs::exists(base / name / "python"));
    support::expect_ranks_pass("PythonRunJob.DISABLED_GoesOn",
                               {.world_size = kRanks, .env = {{"JOB_FOLDER", (base / name).string()}}});
  }
  python("back");
}

}  // namespace
