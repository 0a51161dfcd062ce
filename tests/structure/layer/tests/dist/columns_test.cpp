// A layer that was added to the library: it composes with averaging, and has settings, receipts and a state of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <accelerate/accelerate.hpp>
#include <accelerate/parallel/layers/columns_plugin.hpp>

#include <cstdlib>

#include "accelerate/config/option.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

using namespace accelerate;
using support::message_of;
using support::rank;
using testing::HasSubstr;

namespace {

torch::nn::Sequential net_of() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::Tanh(), torch::nn::Linear(7, 3));
}
torch::Tensor rows(int64_t step, int64_t reader) {
  return torch::randn({4, 5}, at::make_generator<at::CPUGeneratorImpl>(100 + 10 * step + reader));
}
torch::Tensor loss_of(const torch::Tensor& output) { return (output - 0.3).pow(2).mean(); }
torch::optim::SGD sgd(const torch::nn::Sequential& net) {
  return torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
}

}  // namespace

RANKS_TEST(Columns, TrainAsOneProcess, 2, 4) {
  const std::string folder = support::scratch_dir();
  const int64_t readers = support::world_size() / 2, reader = rank() / 2;
  auto plain = net_of();
  auto plainly = sgd(plain);
  for (const bool resumed : {false, true}) {
    AcceleratorState::reset();
    Accelerator accelerator({.cpu = true, .layer_plugins = {ColumnsPlugin{.size = 2}}});
    auto net = net_of();
    auto [model, optimizer] = accelerator.prepare(net, sgd(net));
    if (resumed) accelerator.load_state(folder);
    for (int64_t step = resumed ? 3 : 0; step < (resumed ? 5 : 3); ++step) {
      accelerator.backward(loss_of(model(rows(step, reader))));
      plainly.zero_grad();
      for (int64_t r = 0; r < readers; ++r)
        (loss_of(plain->forward(rows(step, r))) / static_cast<double>(readers)).backward();
      const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
      EXPECT_NEAR(accelerator.clip_grad_norm_(net->parameters(), 0.5).item<double>(), expected, 1e-5 * expected);
      optimizer.step();
      optimizer.zero_grad();
      plainly.step();
    }
    const auto found = net->parameters(), expected = plain->parameters();
    for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(torch::allclose(found[i], expected[i], 1e-4, 1e-6)) << i;
    const auto receipt = accelerator.receipts()["ColumnsPlugin.size"];
    EXPECT_EQ(receipt.value, "2");
    EXPECT_EQ(receipt.state, ReceiptState::acted);
    EXPECT_THAT(receipt.effect, HasSubstr(resumed ? "after 5 steps" : "after 3 steps"));
    if (!resumed) accelerator.save_state(folder);
  }
}

RANKS_TEST(Columns, SettingsComeFromTheLauncher, 2) {
  const auto* row = config::launch_table().find("columns_size");
  ASSERT_TRUE(row);
  ::setenv(row->variable, "2", 1);
  Accelerator accelerator({.cpu = true, .layer_plugins = {ColumnsPlugin{}}});
  EXPECT_EQ(accelerator.receipts()["ColumnsPlugin.size"].value, "2");
  AcceleratorState::reset();
  EXPECT_THAT(
      message_of<ConfigError>([] { Accelerator wrong({.cpu = true, .layer_plugins = {ColumnsPlugin{.size = 3}}}); }),
      HasSubstr("ColumnsPlugin::size is 3, expected a divisor of the 2 ranks"));
}
