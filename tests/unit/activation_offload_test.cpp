#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <thread>

#include "accelerate/residency/recompute.hpp"
#include "accelerate/utils/error.hpp"
#include "counting_allocator.hpp"
#include "message_of.hpp"
#include "residency/activations/saved_tensor_hooks.hpp"
#include "residency/spill_file.hpp"

using namespace accelerate;

namespace {

namespace nn = torch::nn;
using at::Tensor;

struct ActivationOffloadTest : testing::Test {
  void SetUp() override { std::filesystem::create_directories(directory); }
  void TearDown() override {
    EXPECT_TRUE(std::filesystem::is_empty(directory)) << "the file has no name";
    std::filesystem::remove_all(directory);
  }
  const std::filesystem::path directory =
      std::filesystem::path(testing::TempDir()) / ("activations." + std::to_string(::getpid()));

  /// Everything moves.
  ActivationOffloadOptions all() const { return {.directory = directory, .min_bytes = 1}; }
  /// Waits until what `offload` moves is no longer in memory.
  static void wait_until_written(const support::CountingAllocator& memory, int64_t bytes) {
    for (int i = 0; i < 500 && memory.live() > bytes; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
};

nn::Sequential model(int64_t width = 32) {
  return nn::Sequential(nn::Linear(width, 2 * width), nn::GELU(), nn::Dropout(0.3), nn::Linear(2 * width, width),
                        nn::LayerNorm(nn::LayerNormOptions({width})), nn::Tanh(), nn::Linear(width, width));
}

TEST_F(ActivationOffloadTest, GradientsAreTheSameBitForBit) {
  auto m = model();
  auto conv = nn::Conv2d(nn::Conv2dOptions(2, 4, 3));
  const auto x = torch::randn({8, 32});
  const auto step = [&](const std::function<Tensor(const std::function<Tensor()>&)>& around, bool twice) {
    torch::manual_seed(3);
    m->zero_grad();
    const auto input = x.clone().requires_grad_();
    const auto loss = around([&] {
      const auto h = m->forward(input).view({2, 2, 8, 8}).contiguous(at::MemoryFormat::ChannelsLast);
      const auto parts = conv->forward(h).flatten(1).chunk(3, -1);
      return (parts[0] * parts[1].sigmoid()).sum() +
             (parts[2].slice(1, 0, 2).exp().pow(2).sum() + h.transpose(1, 3).sin().mean());
    });
    loss.backward({}, twice);
    if (twice) loss.backward();
    std::vector<Tensor> result{loss.detach(), input.grad()};
    for (const auto& p : m->parameters()) result.push_back(p.grad().clone());
    return result;
  };
  for (const bool twice : {false, true})
    for (const int64_t prefetch_bytes : {int64_t{0}, int64_t{1} << 20})
      for (const int64_t max_pending : {int64_t{0}, int64_t{1} << 20}) {
        const auto plain = step([](const auto& forward) { return forward(); }, twice);
        const auto found = step(
            [&](const auto& forward) {
              auto options = all();
              options.prefetch_bytes = prefetch_bytes;
              options.max_pending_bytes = max_pending;
              const ActivationOffload offload(options);
              return forward();
            },
            twice);
        ASSERT_EQ(found.size(), plain.size());
        for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(torch::equal(found[i], plain[i])) << i;
      }
}

// A product by a fresh factor is quicker than writing the factor.
TEST_F(ActivationOffloadTest, ForwardWaitsForTheDiskWhereTooMuchIsPending) {
  auto& memory = support::CountingAllocator::install();
  constexpr int64_t kLayers = 200, kSize = 1 << 16, kBytes = kSize * 4;
  const auto x = torch::ones({kSize}, torch::requires_grad());
  const auto before = memory.live();
  memory.reset_peak();
  ActivationOffload offload({.directory = directory, .max_pending_bytes = 2 * kBytes});
  auto h = x * 1;
  for (int64_t i = 0; i < kLayers; ++i) h = h * torch::ones({kSize});
  offload.close();
  // Two that are pending, the factor in use and one just let go, the product and the one before.
  EXPECT_LE(memory.peak() - before, 6 * kBytes);
  EXPECT_EQ(offload.stats().moved, kLayers);
}

TEST_F(ActivationOffloadTest, MemoryFallsAndIsFetchedAheadInBackward) {
  auto& memory = support::CountingAllocator::install();
  constexpr int64_t kLayers = 24, kSize = 1 << 16, kBytes = kSize * 4;
  const auto x = torch::randn({kSize}, torch::requires_grad());
  const auto forward = [&] {
    auto h = x * 1;
    for (int64_t i = 0; i < kLayers; ++i) h = h.sin();
    return h.sum();
  };
  const auto expected = torch::autograd::grad({forward()}, {x})[0];
  const auto before = memory.live();
  ActivationOffload offload({.directory = directory, .prefetch_bytes = 2 * kBytes});
  const auto loss = forward();
  offload.close();
  wait_until_written(memory, before + kBytes);
  EXPECT_LT(memory.live() - before, kBytes) << "all " << kLayers << " tensors have left";
  memory.reset_peak();
  const auto g = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0];
  EXPECT_TRUE(torch::equal(g, expected));
  EXPECT_LT(memory.live() - before, 2 * kBytes) << "a retained graph lets go of what it fetched; the gradient remains";
  // The gradient twice (before and after an operator), cos(h), the tensor in use, one just let go, and two ahead.
  EXPECT_LE(memory.peak() - before, 7 * kBytes);
  const auto stats = offload.stats();
  EXPECT_EQ(stats.moved, kLayers);
  EXPECT_EQ(stats.bytes_moved, kLayers * kBytes);
  EXPECT_EQ(stats.fetched_late, 1) << "only the first one could not be foreseen";
  EXPECT_EQ(stats.prefetched, kLayers - 1);
}

TEST_F(ActivationOffloadTest, ParametersTheirViewsAndSmallTensorsStay) {
  const auto w = torch::randn({64, 64}, torch::requires_grad());
  const auto x = torch::randn({64, 64});
  const auto small = torch::randn({4}, torch::requires_grad());
  const auto forward = [&] { return (x.mm(w) * w.t() * w.view({-1}).view({64, 64})).sum() + (small * 1).exp().sum(); };
  ActivationOffload offload(
      {.directory = directory, .min_bytes = 64 * 64 * 4, .keep = [&](const Tensor& t) { return t.is_same(x); }});
  const auto y = forward();
  offload.close();
  const auto stats = offload.stats();
  EXPECT_EQ(stats.moved, 2) << "x.mm(w), and its product with w.t()";
  EXPECT_EQ(stats.kept, 4) << "x, w.t(), w as it was viewed, small.exp()";
  const auto g = torch::autograd::grad({y}, {w, small});
  const auto expected = torch::autograd::grad({forward()}, {w, small});
  EXPECT_TRUE(torch::equal(g[0], expected[0]));
  EXPECT_TRUE(torch::equal(g[1], expected[1]));
}

TEST_F(ActivationOffloadTest, MembersOfTheResidencyEngineStay) {
  const ActivationOffload offload(all());
  const auto storage = torch::randn({64}).storage();
  const Tensor member(c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::DeferredInit}),
      torch::scalarTypeToTypeMeta(at::kFloat)));
  member.unsafeGetTensorImpl()->set_sizes_contiguous({64});
  const auto packed = residency::current_saved_tensor_hooks()->pack(member);
  EXPECT_EQ(offload.stats().kept, 1);
  EXPECT_TRUE(packed->unpack().is_same(member));
}

TEST_F(ActivationOffloadTest, ATensorSavedSeveralTimesMovesOnce) {
  const auto x = torch::randn({64}, torch::requires_grad());
  ActivationOffload offload(all());
  Tensor y;
  {
    const auto h = x * 2;
    y = (h.sin() + h.view({8, 8}).t().cos().reshape({64}) + h.pow(2)).sum();
  }
  offload.close();
  EXPECT_EQ(offload.stats().saved, 3);
  EXPECT_EQ(offload.stats().moved, 1);
  const auto h = x * 2;
  const auto plain = (h.sin() + h.view({8, 8}).t().cos().reshape({64}) + h.pow(2)).sum();
  EXPECT_TRUE(torch::equal(torch::autograd::grad({y}, {x})[0], torch::autograd::grad({plain}, {x})[0]));
  // A small part of a large tensor moves by itself, once.
  ActivationOffload again(all());
  {
    const auto big = torch::randn({1024}) + x.sum();
    y = big.slice(0, 3, 35, 2).sin().sum() + big.slice(0, 3, 35, 2).cos().sum();
  }
  again.close();
  EXPECT_EQ(again.stats().moved, 1);
  EXPECT_EQ(again.stats().bytes_moved, 16 * 4);
  EXPECT_NO_THROW(y.backward());
}

TEST(ActivationOffload, WithoutAnAcceleratorAndWithoutADirectoryItDoesNothing) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "there is an accelerator here";
  const auto x = torch::randn({1 << 16}, torch::requires_grad());
  const ActivationOffload offload;
  EXPECT_EQ(residency::saved_tensor_hooks_depth(), 0);
  x.exp().sum().backward();
  EXPECT_EQ(offload.stats().saved, 0);
}

TEST_F(ActivationOffloadTest, InPlaceChangesAreErrors) {
  const auto x = torch::randn({64}, torch::requires_grad());
  ActivationOffload offload(all());
  auto h = x * 2;
  const auto y = h.sin().sum();
  offload.close();
  h.add_(1);
  EXPECT_NE(support::message_of<ShapeError>([&] { y.backward(); }).find("modified in place"), std::string::npos);
}

TEST_F(ActivationOffloadTest, MovesTheInputsOfCheckpoints) {
  auto& memory = support::CountingAllocator::install();
  constexpr int64_t kSize = 1 << 16, kBytes = kSize * 4;
  const auto x = torch::randn({kSize}, torch::requires_grad());
  int runs = 0;
  const auto before = memory.live();
  ActivationOffload offload({.directory = directory});
  auto h = x * 1;
  for (int i = 0; i < 8; ++i) {
    h = checkpoint([&runs](const Tensor& h) { return ++runs, h.sin().exp().cos(); }, {}, h);
  }
  const auto loss = h.sum();
  h.reset();
  offload.close();
  EXPECT_EQ(offload.stats().moved, 8);
  wait_until_written(memory, before + kBytes);
  EXPECT_LT(memory.live() - before, kBytes);
  const auto g = torch::autograd::grad({loss}, {x})[0];
  EXPECT_EQ(runs, 16);
  auto p = x * 1;
  for (int i = 0; i < 8; ++i) p = p.sin().exp().cos();
  EXPECT_TRUE(torch::equal(g, torch::autograd::grad({p.sum()}, {x})[0]));
}

TEST_F(ActivationOffloadTest, AFullDiskIsAResourceErrorOfTheOperator) {
  const auto x = torch::randn({1 << 16}, torch::requires_grad());
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{600 << 10, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);  // two tensors of 256 KiB fit
  std::string message;
  {
    const ActivationOffload offload({.directory = directory});
    auto h = (x * 1).sin().sin();
    message = support::message_of<ResourceError>([&] { h.sin(); });
    EXPECT_EQ(offload.stats().moved, 2);
    EXPECT_NO_THROW(h.sum().backward()) << "what was saved before is there";
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("reserving room in '" + directory.string() + "' failed for 262144 bytes beside the 524288"),
            std::string::npos)
      << message;
  EXPECT_NE(message.find("has no room"), std::string::npos) << message;
  EXPECT_TRUE(x.grad().defined());
}

TEST_F(ActivationOffloadTest, OptionsAreChecked) {
  EXPECT_NE(
      support::message_of<ConfigError>([&] { ActivationOffload({.directory = directory / "absent"}); }).find("absent'"),
      std::string::npos);
  EXPECT_NE(support::message_of<ConfigError>([&] {
              ActivationOffload({.directory = directory, .min_bytes = -1});
            }).find("min_bytes = -1"),
            std::string::npos);
  EXPECT_EQ(residency::saved_tensor_hooks_depth(), 0);
}

TEST_F(ActivationOffloadTest, AGraphMayBeDroppedAtAnyMoment) {
  const auto x = torch::randn({1 << 16}, torch::requires_grad());
  for (int i = 0; i < 50; ++i) {
    ActivationOffload offload({.directory = directory});
    const auto y = (x * 1).sin().sin().sin().sum();
    offload.close();
    if (i % 2) y.backward();
  }
}

TEST_F(ActivationOffloadTest, ThreadsUseTheirOwnScopesAndBackwardRunsAnywhere) {
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 10; ++i) {
        const auto x = torch::full({1 << 12}, 0.01 * (t + i), torch::requires_grad());
        ActivationOffload offload(all());
        const auto y = (x * 1).sin().exp().cos().sum();
        offload.close();
        Tensor g;
        std::thread([&] { g = torch::autograd::grad({y}, {x})[0]; }).join();
        right += torch::equal(g, torch::autograd::grad({(x * 1).sin().exp().cos().sum()}, {x})[0]);
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(right, 40);
}

TEST_F(ActivationOffloadTest, RoomInTheFileIsUsedAgain) {
  residency::SpillFile file(directory, {.user = "test", .contents = "nothing of value", .advice = "nothing"});
  const auto a = file.reserve(5000), b = file.reserve(4096), c = file.reserve(1), d = file.reserve(1);
  EXPECT_EQ((std::vector{a, b, c, d}), (std::vector<int64_t>{0, 8192, 12288, 16384}));
  file.release(a, 5000);
  file.release(c, 1);
  file.release(b, 4096);  // joins both
  EXPECT_EQ(file.reserve(16000), 0);
  EXPECT_EQ(file.reserve(1), 20480);
  const std::string text = "seven by";
  std::string back(text.size(), ' ');
  file.write(d, text.data(), 8);
  file.read(d, back.data(), 8);
  EXPECT_EQ(back, text);
  file.release(20480, 1);
  file.release(d, 1);  // now everything from there on is free: the file becomes shorter
  EXPECT_EQ(file.reserve(8192), 16384);
  EXPECT_NE(support::message_of<ResourceError>([&] { file.read(1 << 20, back.data(), 8); }).find("reading in '"),
            std::string::npos);
}

}  // namespace
