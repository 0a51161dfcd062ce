/// What ZeRO's stages take: by dry runs against the paper's formulas, and on real ranks against the dry run.

#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "accelerate/accelerate.hpp"
#include "ranks.hpp"

namespace {

using namespace accelerate;

struct Setting {
  int64_t stage = 0, width = 512, layers = 8, rows = 1, micro_steps = 1;
  const char* precision = "bf16";
};

DeepSpeedPlugin plugin_of(const Setting& setting) {
  return {
      .hf_ds_config =
          R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
    "gradient_accumulation_steps": )" +
          std::to_string(setting.micro_steps) +
          R"(, "zero_optimization": {"reduce_bucket_size": 262144, "stage3_param_persistence_threshold": 0, "stage": )" +
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

/// Of a parameter: bytes that the formula counts, which leaves out the buffers that gradients travel in.
/// At stage 3 neither those of what is whole for a while.
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

/// Counts what tensors of the host hold, now and at most.
class Counting final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = base_->allocate(bytes);
    void* const at = data.get();
    const c10::Device device = data.device();
    add(static_cast<int64_t>(bytes));
    return {at, new Block{std::move(data), static_cast<int64_t>(bytes)}, &forget, device};
  }
  void copy_data(void* to, const void* from, size_t count) const override { base_->copy_data(to, from, count); }
  static Counting& installed() {
    static Counting* const counting = [] {
      auto* const made = new Counting;
      c10::SetCPUAllocator(made, /*priority=*/100);
      return made;
    }();
    return *counting;
  }
  int64_t now() const { return now_; }
  int64_t peak() const { return peak_; }
  void reset_peak() { peak_ = now_.load(); }

 private:
  struct Block {
    c10::DataPtr data;
    int64_t bytes;
  };
  static void forget(void* block) {
    auto* const one = static_cast<Block*>(block);
    installed().add(-one->bytes);
    delete one;
  }
  void add(int64_t bytes) {
    const int64_t now = now_ += bytes;
    for (int64_t peak = peak_; now > peak && !peak_.compare_exchange_weak(peak, now);) {
    }
  }
  c10::Allocator* base_ = c10::GetCPUAllocator();
  std::atomic<int64_t> now_ = 0, peak_ = 0;
};

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
      auto& counting = Counting::installed();
      const int64_t before = counting.now();
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

}  // namespace
