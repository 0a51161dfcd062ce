// Models whose weights stay in files: the same results in less memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "accelerate/bigmodel.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/error.hpp"
#include "accelerate/residency.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int64_t kWidth = 64, kLayers = 8;
constexpr int64_t kLayerBytes = (kWidth * kWidth + kWidth) * 4;

/// Equal layers, of which the last shares the first one's weight.
struct StackImpl : torch::nn::Module {
  StackImpl() {
    for (int64_t i = 0; i < kLayers; ++i) layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    last = register_module("last", std::make_shared<torch::nn::Module>("LastImpl"));
    last->register_parameter("weight", layers.front()->weight);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x.matmul(last->named_parameters()["weight"].t());
  }
  std::vector<torch::nn::Linear> layers;
  std::shared_ptr<torch::nn::Module> last;
};
TORCH_MODULE(Stack);

class Dispatch : public testing::Test {
 protected:
  Dispatch() : folder(fs::path(support::scratch_dir()) / testing::UnitTest::GetInstance()->current_test_info()->name()) {
    torch::manual_seed(5);
    whole = Stack();
    accelerate::checkpointing::save_model(accelerate::ModelRef(whole.ptr()), folder, 1 << 30, true);
    input = torch::randn({3, kWidth});
    expected = whole(input);
  }
  static Stack empty() {
    const auto scope = accelerate::init_empty_weights();
    return Stack();
  }
  fs::path folder;
  Stack whole = nullptr;
  at::Tensor input, expected;
};

TEST_F(Dispatch, AModelOnDiskComputesAlikeWithinItsMemory) {
  auto model = empty();
  const int64_t budget = 3 * kLayerBytes + 1024;
  const auto dispatched = accelerate::load_checkpoint_and_dispatch(model, folder, {.device_map = accelerate::DeviceMap{{"", "disk"}}, .disk_memory_bytes = budget});
  EXPECT_EQ(dispatched.streamed_bytes(), kLayers * kLayerBytes);
  accelerate::residency::reset_stats();
  const auto before = accelerate::residency::stats().resident_bytes;
  const torch::NoGradGuard no_grad;
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(torch::equal(model(input), expected));
  const auto stats = accelerate::residency::stats();
  EXPECT_LE(stats.peak_resident_bytes - before, budget);
  EXPECT_GT(stats.bytes_fetched, 2 * kLayers * kLayerBytes);
  EXPECT_GT(stats.prefetch_hits, stats.faults);
}

TEST_F(Dispatch, WhatFitsIsMappedAndNothingIsRead) {
  auto model = empty();
  const auto dispatched = accelerate::load_checkpoint_and_dispatch(model, folder, {.device_map = accelerate::DeviceMap{{"", "disk"}}});
  EXPECT_EQ(dispatched.streamed_bytes(), 0);
  EXPECT_TRUE(torch::equal(model(input), expected));
}

TEST_F(Dispatch, OnlyPartsOnDiskAreStreamed) {
  auto model = empty();
  const auto dispatched = accelerate::load_checkpoint_and_dispatch(model, folder, {.max_memory = accelerate::MaxMemory{{"cpu", 5 * kLayerBytes}}, .disk_memory_bytes = 2 * kLayerBytes});
  EXPECT_GT(dispatched.device_map().size(), 1U);
  EXPECT_GT(dispatched.streamed_bytes(), 0);
  EXPECT_LT(dispatched.streamed_bytes(), kLayers * kLayerBytes);
  EXPECT_TRUE(torch::equal(model(input), expected));
}

TEST_F(Dispatch, AModelInMemoryMovesToDisk) {
  const auto place = folder / "offloaded";
  const auto dispatched = accelerate::disk_offload(whole, place, {.disk_memory_bytes = 2 * kLayerBytes});
  EXPECT_TRUE(fs::exists(place / "model.safetensors"));
  EXPECT_EQ(dispatched.streamed_bytes(), kLayers * kLayerBytes);
  EXPECT_TRUE(torch::equal(whole(input), expected));
}

TEST_F(Dispatch, MoreThanOnePlaceThatComputesIsRefused) {
  auto model = empty();
  const auto message = support::message_of<accelerate::ConfigError>([&] { accelerate::load_checkpoint_and_dispatch(model, folder, {.device_map = accelerate::DeviceMap{{"", 0}, {"layer1", "cpu"}}}); });
  EXPECT_THAT(message, testing::AllOf(HasSubstr("1 GPU(s) and on the host"), HasSubstr("expected one place that computes")));
}

}  // namespace
