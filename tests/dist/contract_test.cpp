// The program of the design's section 4 as it stands there, with the umbrella header alone, and what else that section
// promises by name.
#include <accelerate/accelerate.hpp>

#include <gtest/gtest.h>

#include <filesystem>

#include "ranks.hpp"

namespace {

struct MyOptions {
  int64_t width = 16;
};

struct MyModelImpl : torch::nn::Module {
  explicit MyModelImpl(const MyOptions& options) : hidden(4, options.width), out(options.width, 2) {
    register_module("hidden", hidden);
    register_module("out", out);
  }
  torch::Tensor forward(const torch::Tensor& x) { return out(torch::relu(hidden(x))); }
  torch::nn::Linear hidden, out;
};
TORCH_MODULE(MyModel);

struct MyDataset : torch::data::Dataset<MyDataset> {
  torch::data::Example<> get(size_t i) override {
    const auto x = torch::full({4}, i % 2 ? 1.0 : -1.0);
    return {x, torch::tensor(static_cast<int64_t>(i % 2))};
  }
  std::optional<size_t> size() const override { return 64; }
};

struct MyBatch {
  torch::Tensor a, b;
  ACCELERATE_FIELDS(a, b)
};

RANKS_TEST(Contract, TrainingLoop, 1, 2) {
  const std::filesystem::path runs =
      std::filesystem::path(support::scratch_dir()) / ("runs" + std::to_string(support::world_size()));
  accelerate::Accelerator accelerator(
      {.mixed_precision = "bf16", .gradient_accumulation_steps = 2, .log_with = {"tensorboard"}, .project_dir = runs});
  torch::manual_seed(0);
  auto dataset = MyDataset().map(torch::data::transforms::Stack<>());
  const int64_t warmup_steps = 2, total_steps = 40;
  auto model = MyModel(MyOptions());
  auto optimizer = torch::optim::AdamW(model->parameters(), 5e-2);
  auto loader = accelerate::data::DataLoader(dataset, {.batch_size = 8, .shuffle = true, .num_workers = 2});
  auto scheduler = accelerate::optim::linear_schedule_with_warmup(optimizer, warmup_steps, total_steps);
  auto [m, opt, dl, sched] = accelerator.prepare(model, optimizer, loader, scheduler);
  accelerator.init_trackers("contract", {{"lr", "5e-2"}});

  double first = 0, last = 0;
  for (int epoch = 0; epoch < 5; ++epoch) {
    for (auto& batch : dl) {
      auto step = accelerator.accumulate(m);
      auto loss = torch::cross_entropy_loss(m(batch.data), batch.target);
      accelerator.backward(loss);
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(m->parameters(), 1.0);
      opt.step();
      sched.step();
      opt.zero_grad();
      last = loss.item<double>();
      if (first == 0) first = last;
    }
    accelerator.log({{"loss", last}}, epoch);
  }
  EXPECT_LT(last, first / 2);
  const auto checkpoint = runs / "checkpoint";
  accelerator.save_state(checkpoint);
  accelerator.load_state(checkpoint);
  EXPECT_TRUE(std::filesystem::exists(checkpoint / "model.safetensors"));
  EXPECT_EQ(accelerator.unwrap_model(m).get(), model.get());
  EXPECT_EQ(accelerator.get_state_dict(m).size(), 4u);
  accelerator.save_model(m, runs / "trained");
  accelerator.wait_for_everyone();
  EXPECT_TRUE(std::filesystem::exists(runs / "trained" / "model.safetensors"));
  accelerator.end_training();
  if (accelerator.is_main_process()) {
    EXPECT_TRUE(std::filesystem::exists(runs / "contract" / "hparams.yml"));
  }

  const auto moved = accelerate::send_to_device(MyBatch{torch::ones(2), torch::zeros(1)}, accelerator.device());
  EXPECT_EQ(accelerator.gather(moved).a.size(0), 2 * accelerator.num_processes());
  EXPECT_EQ(accelerator.reduce(torch::ones(1), "sum").item<double>(), static_cast<double>(accelerator.num_processes()));
  EXPECT_EQ(accelerator.pad_across_processes(torch::ones(accelerator.process_index() + 1)).size(0),
            accelerator.num_processes());
  EXPECT_EQ(accelerator.mixed_precision(), "bf16");
  EXPECT_EQ(accelerator.gradient_accumulation_steps(), 2);
  EXPECT_EQ(accelerator.split_between_processes(std::vector<int>(8)).size(),
            static_cast<size_t>(8 / accelerator.num_processes()));
  {
    auto region = accelerator.autocast();
    EXPECT_EQ(torch::mm(torch::ones({2, 2}), torch::ones({2, 2})).scalar_type(), torch::kBFloat16);
  }
  { auto first_scope = accelerator.main_process_first(); }
  accelerator.set_trigger();
  EXPECT_TRUE(accelerator.check_trigger());
  EXPECT_FALSE(accelerator.check_trigger());
  auto rest = accelerator.skip_first_batches(dl, 1);
  EXPECT_EQ(rest.size(), dl.size() - 1);
  accelerator.free_memory();
}

}  // namespace
