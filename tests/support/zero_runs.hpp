#pragma once

/// A small model, and its training by a DeepSpeed configuration, for tests of ZeRO.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "accelerate/accelerator.hpp"
#include "accelerate/model/hidden_size.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"

namespace zero_runs {

using namespace accelerate;

inline constexpr int64_t kMicroSteps = 2, kSteps = 4;

struct ThreeLayersImpl : torch::nn::Module, HasHiddenSize {
  ThreeLayersImpl() {
    namespace nn = torch::nn;
    torch::manual_seed(5);
    first = register_module("first", nn::Linear(5, 8));
    second = register_module("second", nn::Linear(8, 8));
    third = register_module("third", nn::Linear(8, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return third(torch::tanh(second(torch::tanh(first(x))))); }
  int64_t hidden_size() const override { return 8; }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};
TORCH_MODULE(ThreeLayers);

/// Another one for each micro-step of each rank.
inline at::Tensor batch_of(int64_t step, int64_t micro, int64_t rank) {
  torch::manual_seed(1000 + 100 * step + 10 * micro + rank);
  return torch::randn({4, 5});
}
inline at::Tensor loss_of(const at::Tensor& output) { return output.square().mean(); }

inline torch::optim::SGD with_momentum(const std::vector<at::Tensor>& parameters) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.2).momentum(0.9));
}

inline DeepSpeedPlugin stage(int64_t number, const std::string& more = "") {
  return {
      .hf_ds_config =
          R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": )" +
          std::to_string(number) + "}" + more + "}"};
}
inline const std::string kUnclipped = R"(, "gradient_clipping": 0)";

template <class Model, class Optimizer>
void train(Accelerator& accelerator, Model& m, Optimizer& opt, int64_t steps = kSteps) {
  for (int64_t step = 0; step < steps; ++step)
    for (int64_t micro = 0; micro < kMicroSteps; ++micro) {
      const auto scope = accelerator.accumulate(m);
      accelerator.backward(loss_of(m(batch_of(step, micro, accelerator.process_index()))));
      opt.step();
      opt.zero_grad();
    }
}

inline void expect_equal(const std::vector<at::Tensor>& ours, const std::vector<at::Tensor>& expected,
                         double tolerance) {
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i)
    EXPECT_TRUE(torch::allclose(ours[i].to(at::kFloat), expected[i], tolerance, tolerance))
        << "parameter " << i << ": " << (ours[i].to(at::kFloat) - expected[i]).abs().max();
}

}  // namespace zero_runs
