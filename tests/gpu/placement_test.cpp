/// The tensors that prepare puts on the device; and training there is training.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>

#include "gpu.hpp"

namespace gpu_test {
namespace {

using namespace accelerate;

class GpuPlacement : public GpuTest {};
class GpuLoader : public GpuTest {};

std::vector<at::Tensor> rows_of(int64_t count, int64_t width) {
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < count; ++i) rows.push_back(numbers({width}, 100 + static_cast<uint64_t>(i), at::kCPU));
  return rows;
}

TEST_F(GpuPlacement, PrepareMovesModelBatchesAndOptimizerState) {
  Accelerator accelerator;
  ASSERT_EQ(accelerator.device(), device());
  Mlp net(16, 2);
  auto [m, optimizer, loader] = accelerator.prepare(net, torch::optim::AdamW(net->parameters(), 1e-3),
                                                    data::DataLoader(rows_of(10, 16), {.batch_size = 4}));
  for (auto& batch : loader) {
    EXPECT_EQ(batch.device(), device());
    accelerator.backward(loss_of(m(batch)));
    optimizer.step();
    for (const auto& parameter : net->parameters()) EXPECT_EQ(parameter.grad().device(), device());
    optimizer.zero_grad();
  }
  for (const auto& parameter : net->parameters()) {
    EXPECT_EQ(parameter.device(), device());
    const auto& state =
        static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
    EXPECT_EQ(state.exp_avg().device(), device());
    EXPECT_EQ(state.exp_avg_sq().device(), device());
  }
}

TEST_F(GpuPlacement, StateOfAnOptimizerThatHasSteppedMovesToo) {
  Mlp net(8, 2);
  torch::optim::Adam adam(net->parameters(), 1e-3);
  loss_of(net(numbers({4, 8}, 1, at::kCPU))).backward();
  adam.step();
  Accelerator accelerator;
  auto [m, optimizer] = accelerator.prepare(net, adam);
  optimizer.zero_grad();
  accelerator.backward(loss_of(m(numbers({4, 8}, 1))));
  optimizer.step();
  for (const auto& parameter : net->parameters()) {
    const auto& state =
        static_cast<torch::optim::AdamParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
    EXPECT_EQ(state.exp_avg().device(), device());
    EXPECT_EQ(state.step(), 2);
  }
}

TEST_F(GpuPlacement, NothingMovesWithoutDevicePlacement) {
  Accelerator accelerator({.device_placement = false});
  Mlp net(8, 1);
  auto [m, loader] = accelerator.prepare(net, data::DataLoader(rows_of(4, 8), {.batch_size = 4}));
  for (auto& batch : loader) EXPECT_TRUE(batch.is_cpu());
  for (const auto& parameter : net->parameters()) EXPECT_TRUE(parameter.is_cpu());
}

TEST_F(GpuPlacement, TrainsAsTheCpuDoes) {
  const auto settings = torch::optim::AdamWOptions(1e-3);
  Mlp net(32, 3), on_cpu(32, 3);
  torch::optim::AdamW plain(on_cpu->parameters(), settings);
  Accelerator accelerator;
  auto [m, optimizer] = accelerator.prepare(net, torch::optim::AdamW(net->parameters(), settings));
  for (uint64_t step = 0; step < 5; ++step) {
    const auto loss = loss_of(m(numbers({16, 32}, step)));
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    const auto expected = loss_of(on_cpu(numbers({16, 32}, step, at::kCPU)));
    expected.backward();
    plain.step();
    plain.zero_grad();
    // Sums of 32 products in another order differ by some 1e-7, and Adam's early steps amplify that a little.
    EXPECT_TRUE(close(loss, expected, 1e-5)) << "step " << step;
  }
}

/// Copies of batches wait behind what the device computes, while the loop and the workers go on: memory that was used
/// again too early would show other rows.
TEST_F(GpuLoader, PinnedBatchesThatAreCopiedLateArriveWhole) {
  const int64_t count = 64, width = on_gpu() ? 1 << 18 : 1 << 10, busy = on_gpu() ? 4096 : 16;
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < count; ++i) rows.push_back(torch::full({width}, static_cast<double>(i)));
  Accelerator accelerator({.dataloader_config = {.non_blocking = true}});
  auto loader =
      accelerator.prepare_data_loader(data::DataLoader(rows, {.batch_size = 4, .num_workers = 2, .pin_memory = true}));
  at::Tensor work = numbers({busy, busy}, 1);
  for (int pass = 0; pass < 3; ++pass) {
    std::vector<at::Tensor> lowest, highest;
    for (auto& batch : loader) {
      work = torch::tanh(work.matmul(work));  // about two milliseconds of a GPU
      lowest.push_back(batch.amin(1));
      highest.push_back(batch.amax(1));
    }
    const auto expected = torch::arange(count, at::kFloat);
    EXPECT_TRUE(same_bits(torch::cat(lowest), expected)) << "pass " << pass;
    EXPECT_TRUE(same_bits(torch::cat(highest), expected)) << "pass " << pass;
  }
}

TEST_F(GpuLoader, PinsWhatItIsToldToPin) {
  for (const bool pin : {false, true})
    for (auto& batch : data::DataLoader(rows_of(4, 8), {.batch_size = 2, .pin_memory = pin})) {
      EXPECT_TRUE(batch.is_cpu());
      EXPECT_EQ(batch.is_pinned(), pin && on_cuda());
    }
}

}  // namespace
}  // namespace gpu_test
