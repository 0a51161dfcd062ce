/// DeepSpeed's example configurations train, on two ranks; those of other engines, and of what is not here, say so.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "accelerate/accelerate.hpp"
#include "both_stores.hpp"
#include "ranks.hpp"
#include "zero_runs.hpp"

namespace {

using namespace accelerate;
using namespace zero_runs;
using nlohmann::json;

/// Five steps. @return what was refused
std::string trained_by(const json& row) {
  json config = row["config"];
  const bool fills = row["want"] == "fill";
  if (!config.contains("train_batch_size") && !config.contains("train_micro_batch_size_per_gpu"))
    config["train_micro_batch_size_per_gpu"] = 1;
  if (!fills && config["train_micro_batch_size_per_gpu"] == "auto") config["train_micro_batch_size_per_gpu"] = 1;
  for (const char* offload : {"/zero_optimization/offload_optimizer", "/zero_optimization/offload_param"})
    if (const json::json_pointer at(offload); config.contains(at) && config[at].contains("nvme_path"))
      config[at]["nvme_path"] = support::scratch_dir() + config[at]["nvme_path"].get<std::string>();
  // The reference's plugin wants the section, and as one.
  if (!config.contains("zero_optimization")) config["zero_optimization"] = {{"stage", 0}};
  else if (config["zero_optimization"] == true) config["zero_optimization"] = {{"stage", 1}};
  support::reset_states();
  try {
    Accelerator accelerator(
        {.cpu = true, .deepspeed_plugin = DeepSpeedPlugin{.hf_ds_config = DeepSpeedConfig(config.dump())}});
    ThreeLayers model;
    const data::DataLoader loader(std::vector<at::Tensor>(64, torch::ones({5})), {.batch_size = 4});
    const auto train = [&](auto& m, auto& optimizer) {
      const auto type = m->parameters().front().scalar_type();
      for (int64_t step = 0; step < 5; ++step) {
        const auto loss = loss_of(m(batch_of(step, 0, accelerator.process_index()).to(type)).to(at::kFloat));
        EXPECT_TRUE(loss.isfinite().template item<bool>()) << loss;
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
      }
    };
    if (config.contains("optimizer") && config.contains("scheduler")) {
      const DummyOptim dummy(model->parameters());
      auto [m, optimizer, scheduler, ready] = accelerator.prepare(
          model, dummy, DummyScheduler{.optimizer = dummy, .total_num_steps = 100, .warmup_num_steps = 10}, loader);
      train(m, optimizer);
    } else if (config.contains("optimizer")) {
      auto [m, optimizer, ready] = accelerator.prepare(model, DummyOptim(model->parameters()), loader);
      train(m, optimizer);
    } else {
      auto [m, optimizer, ready] = accelerator.prepare(model, torch::optim::AdamW(model->parameters()), loader);
      train(m, optimizer);
    }
    static_cast<void>(accelerator.receipts());
    accelerator.end_training();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

RANKS_TEST(ZeroExamples, Train, 2) {
  std::ifstream file(ACCELERATE_SOURCE_DIR "/tests/unit/fixtures/deepspeed_examples.jsonl");
  std::filesystem::current_path(support::scratch_dir());
  int64_t trained = 0, refused = 0;
  for (std::string line; std::getline(file, line);) {
    const json row = json::parse(line);
    if ((row["want"] != "run" && row["want"] != "fill") || !row.contains("config")) continue;
    SCOPED_TRACE(row["name"].get<std::string>());
    const std::string error = trained_by(row);
    if (error.find("not in this version") != std::string::npos) {
      ++refused;
    } else {
      EXPECT_EQ(error, "");
      ++trained;
    }
  }
  EXPECT_EQ(trained, 55);
  EXPECT_EQ(refused, 0);
}
