/// Memory of ZeRO's stages: by dry runs against the paper's formulas, and on real ranks against the dry run.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "accelerate/accelerate.hpp"
#include "accelerate/parallel/zero_memory.hpp"
#include "counting_allocator.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace {

using namespace accelerate;

struct Setting {
  int64_t stage = 0, width = 512, layers = 8, rows = 1, micro_steps = 1;
  const char* precision = "bf16";
};

DeepSpeedPlugin plugin_of(const Setting& setting) {
  return {.hf_ds_config =
              R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
    "gradient_accumulation_steps": )" +
              std::to_string(setting.micro_steps) +
              R"(, "zero_optimization": {"reduce_bucket_size": 262144, "stage3_param_persistence_threshold": 0, )"
              R"("stage": )" +
              std::to_string(setting.stage) + "}}"};
}

/// Three steps of the same loop, dry or real; the second one knows in which order units are used.
void train(const Setting& setting, const std::function<void(const std::string&)>& mark) {
  namespace nn = torch::nn;
  Accelerator accelerator({.mixed_precision = setting.precision, .deepspeed_plugin = plugin_of(setting)});
  nn::Sequential model;
  {
    auto empty = init_empty_weights();
    for (int64_t i = 0; i < setting.layers; ++i)
      model->push_back(nn::Linear(nn::LinearOptions(setting.width, setting.width).bias(false)));
  }
  auto [m, optimizer] = accelerator.prepare(model, torch::optim::AdamW(model->parameters(), 1e-3));
  const auto type = std::string(setting.precision) == "no"     ? at::kFloat
                    : std::string(setting.precision) == "fp16" ? at::kHalf
                                                               : at::kBFloat16;
  const auto x =
      torch::ones({setting.rows, setting.width}, at::TensorOptions().device(accelerator.device()).dtype(type));
  mark("prepare");
  for (int step = 0; step < 3; ++step) {
    for (int64_t micro = 1; micro <= setting.micro_steps; ++micro) {
      const auto scope = accelerator.accumulate(m);
      auto loss = m(x).to(at::kFloat).square().mean();
      mark("forward");
      accelerator.backward(loss);
      loss.reset();
      mark(micro < setting.micro_steps ? "backward without a reduction" : "backward");
      optimizer.step();
      if (micro == setting.micro_steps) mark("step");
      optimizer.zero_grad();
    }
    mark("zero_grad");
  }
}

DryRunReport dry(const Setting& setting, int64_t ranks, int64_t rank = 0) {
  return dry_run({.num_processes = ranks, .process_index = rank},
                 [&](const DryRunMark& mark) { train(setting, [&](const std::string& name) { mark(name); }); });
}

/// Bytes of a parameter that the formula counts, which leaves out the buffers that gradients travel in.
/// At stage 3 it leaves out units that are whole for a while, too.
double states(const Setting& setting, const MemoryByUse& memory) {
  const int64_t buffers = memory[MemoryUse::staging] + (setting.stage == 3 ? memory[MemoryUse::gathered] : 0);
  return static_cast<double>(memory.total() - buffers) /
         static_cast<double>(setting.layers * setting.width * setting.width);
}

/// Within 1 %, which is the padding of pieces to equal sizes, the scalars of losses, and one batch of one row.
testing::Matcher<double> about(double bytes) { return testing::DoubleNear(bytes, 0.01 * bytes); }

/// Rajbhandari et al., arXiv:1910.02054, figure 1: 2 bytes of parameter, 2 of gradient, 12 of master and moments.
TEST(ZeroMemory, ModelStatesAreThoseOfThePaper) {
  for (const char* precision : {"bf16", "fp16"})
    for (const int64_t ranks : {1, 2, 5, 64}) {
      const auto w = static_cast<double>(ranks);
      const auto held = [&](int64_t stage, const char* phase, int64_t micro_steps = 1) {
        const Setting setting{.stage = stage, .micro_steps = micro_steps, .precision = precision};
        return states(setting, dry(setting, ranks).phase(phase).at_end);
      };
      SCOPED_TRACE(std::string(precision) + " on " + std::to_string(ranks));
      EXPECT_THAT(held(0, "backward"), about(16));
      EXPECT_THAT(held(1, "backward"), about(2 + 14 / w)) << "gradients are reduced at once";
      if (ranks > 1) {
        EXPECT_THAT(held(1, "backward without a reduction", 2), about(4 + 12 / w)) << "whole gradients wait";
      }
      EXPECT_THAT(held(2, "backward"), about(2 + 14 / w));
      EXPECT_THAT(held(3, "step"), about(16 / w));
    }
}

/// Sums of several backwards are in fp32, where one is in 16 bits.
TEST(ZeroMemory, SumsOfGradientsAreInTheMastersType) {
  const Setting setting{.stage = 2, .micro_steps = 2};
  const auto report = dry(setting, 2);
  EXPECT_THAT(states(setting, report.phase("backward without a reduction").at_end), about(2 + 14 / 2.0));
  EXPECT_THAT(states(setting, report.phase("backward").at_end), about(2 + 16 / 2.0));
}

/// By sockets, where each rank holds what the dry run says; with memory in common there is less.
TEST(ZeroMemory, ThePeakOfRealRanksIsThatOfTheDryRun) {
  if (!support::is_rank()) {
    support::expect_ranks_pass(
        "ZeroMemory.ThePeakOfRealRanksIsThatOfTheDryRun",
        {.world_size = 2, .env = {{"ACCELERATE_SHARED_MEMORY", "0"}, {"ACCELERATE_USE_CPU", "1"}}});
    return;
  }
  for (const char* precision : {"no", "bf16"})
    for (int64_t stage = 0; stage <= 3; ++stage) {
      const Setting setting{.stage = stage, .width = 256, .layers = 48, .rows = 2, .precision = precision};
      SCOPED_TRACE("stage " + std::to_string(stage) + ", " + precision);
      const auto report = dry(setting, 2, support::rank());
      auto& counting = support::CountingAllocator::install();
      const int64_t before = counting.live();
      std::map<std::string, int64_t> peaks;
      train(setting, [&](const std::string& phase) {
        peaks[phase] = counting.peak() - before;
        counting.reset_peak();
      });
      GradientState::reset();
      AcceleratorState::reset(/*reset_partial_state=*/true);
      int64_t real = 0, expected = 0;
      std::string all;
      for (const char* phase : {"forward", "backward", "step"}) {
        const int64_t dry_peak = report.phase(phase).at_peak.total();
        real = std::max(real, peaks[phase]), expected = std::max(expected, dry_peak);
        all += std::string(phase) + ": " + std::to_string(peaks[phase]) + ", dry " + std::to_string(dry_peak) + "; ";
      }
      EXPECT_NEAR(static_cast<double>(real), static_cast<double>(expected), 0.03 * static_cast<double>(expected))
          << all;
    }
}

/// A weight that two modules share is one, and the largest layer is a module with what is its own.
TEST(ZeroMemory, RulesOfThumbCountAModelsParametersOnce) {
  struct Tied : torch::nn::Module {
    Tied() {
      const at::Tensor weight = torch::empty({2'000, 1'000}, at::kMeta);
      for (const char* name : {"first", "second"}) {
        auto part = register_module(name, std::make_shared<torch::nn::Module>());
        part->register_parameter("weight", weight);
      }
      second()->register_parameter("bias", torch::empty({1'000'000}, at::kMeta));
    }
    std::shared_ptr<torch::nn::Module> second() { return children().back(); }
  };
  const auto model = std::make_shared<Tied>();
  testing::internal::CaptureStdout();
  estimate_zero2_model_states_mem_needs_all_live(model, 8, 2, 1.0);
  estimate_zero3_model_states_mem_needs_all_live(model, 8, 2, 1.0);
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            zero2_memory_table(
                {.total_params = 3'000'000, .num_gpus_per_node = 8, .num_nodes = 2, .additional_buffer_factor = 1.0}) +
                zero3_memory_table({.total_params = 3'000'000,
                                    .largest_layer_params = 3'000'000,
                                    .num_gpus_per_node = 8,
                                    .num_nodes = 2,
                                    .additional_buffer_factor = 1.0}));
  const auto problem = [](const Zero2MemoryOptions& options) {
    return support::message_of<ConfigError>([&] { estimate_zero2_model_states_mem_needs(options); });
  };
  EXPECT_THAT(problem({.total_params = -1}), testing::HasSubstr("total_params is -1"));
  EXPECT_THAT(problem({.total_params = 1, .num_nodes = 0}), testing::HasSubstr("num_nodes is 0"));
  EXPECT_THAT(problem({.total_params = int64_t{1} << 50, .num_gpus_per_node = 1 << 20}),
              testing::HasSubstr("more than can be counted"));
}

}  // namespace
