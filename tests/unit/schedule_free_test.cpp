// The optimizer of examples/by_feature/schedule_free.cpp against the package schedulefree.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <accelerate/accelerate.hpp>

#include "../../examples/by_feature/schedule_free.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "scratch.hpp"

namespace {

using accelerate_examples::AdamWScheduleFree;
using accelerate_examples::ScheduleFreeOptions;

constexpr int64_t kSteps = 40;

/// Weights after each step; in the middle they are those for evaluation for a moment.
std::map<std::string, at::Tensor> trained(const ScheduleFreeOptions& options, const at::Tensor& start,
                                          const at::Tensor& gradients) {
  std::map<std::string, at::Tensor> result;
  const at::Tensor weight = start.clone().requires_grad_(true), bias = start[0].clone().requires_grad_(true),
                   unused = torch::ones(3).requires_grad_(true);
  AdamWScheduleFree optimizer({weight, bias, unused}, options);
  optimizer.train();
  for (int64_t i = 0; i < kSteps; ++i) {
    weight.mutable_grad() = gradients[i].clone();
    bias.mutable_grad() = gradients[i][1].clone();
    optimizer.step();
    result[fmt::format("trained{}", i)] = torch::cat({weight.detach().flatten(), bias.detach()});
    if (i % 10 != 9) continue;
    optimizer.eval();
    result[fmt::format("averaged{}", i)] = torch::cat({weight.detach().flatten(), bias.detach()});
    optimizer.train();
  }
  EXPECT_TRUE(unused.equal(torch::ones(3)));
  return result;
}

TEST(ScheduleFree, IsThePackages) {
  SKIP_WITHOUT_PYTHON();
  torch::manual_seed(3);
  const at::Tensor start = torch::randn({5, 7}), gradients = torch::randn({kSteps, 5, 7}) * 3;
  const auto inputs = support::scratch("inputs.safetensors"), outputs = support::scratch("outputs.safetensors");
  accelerate::save_safetensors(inputs, {{"start", start}, {"gradients", gradients}});
  for (const bool with_all : {false, true}) {
    ScheduleFreeOptions options;
    options.lr = 0.01;
    if (with_all)
      options.beta1 = 0.95, options.beta2 = 0.99, options.eps = 1e-6, options.weight_decay = 0.1,
      options.warmup_steps = 15;
    const auto peer = support::run_python(
        "tests/unit/schedule_free_peer.py",
        {inputs.string(), outputs.string(), fmt::format("{}", options.lr), fmt::format("{}", options.beta1),
         fmt::format("{}", options.beta2), fmt::format("{}", options.eps), fmt::format("{}", options.weight_decay),
         fmt::format("{}", options.warmup_steps)});
    ASSERT_EQ(peer.exit_code, 0) << peer.output;
    const auto expected = accelerate::load_safetensors(outputs);
    const auto found = trained(options, start, gradients);
    ASSERT_EQ(found.size(), expected.size());
    for (const auto& [name, value] : expected)
      EXPECT_LT(support::largest_difference(found.at(name), value), 2e-6) << name;
    EXPECT_GT(support::largest_difference(found.at("trained39"), found.at("averaged39")), 1e-3);
  }
}

TEST(ScheduleFree, StepsOnlyInItsTrainingMode) {
  AdamWScheduleFree optimizer({torch::ones(2).requires_grad_(true)});
  EXPECT_THAT(support::message_of<accelerate::ConfigError>([&] { optimizer.step(); }),
              testing::HasSubstr("call train() first"));
}

}  // namespace
