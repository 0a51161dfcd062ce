/// Weights that travel while others are computed with, and memory that is given back in time and not before.
#include <accelerate/accelerate.hpp>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>

#include "gpu.hpp"
#include "scratch.hpp"

namespace gpu_test {
namespace {

using namespace accelerate;

class GpuStreams : public GpuTest {
 protected:
  ~GpuStreams() override { residency::set_paranoid(false); }
};

/// The best of five, after one that nobody counts.
template <class F> double seconds_of(F&& f) {
  using Clock = std::chrono::steady_clock;
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 6; ++i) {
    synchronize();
    const auto begin = Clock::now();
    f();
    synchronize();
    if (i > 0) best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return best;
}

/// A forward through weights in host memory takes about as long as the longer of copying and computing, not as both: so
/// the times that it prints. Most of what it copies is on its way before it is needed.
TEST_F(GpuStreams, PrefetchOverlapsComputation) {
  const at::NoGradGuard no_grad;
  // On an H200 a layer is computed in about the millisecond that its 64 MiB need on the bus.
  const int64_t width = on_gpu() ? 4096 : 64, depth = on_gpu() ? 24 : 6, rows = on_gpu() ? 2048 : 8;
  const int64_t layer_bytes = 4 * (width * width + width);
  const auto x = numbers({rows, width}, 1);
  Mlp whole(width, depth);
  whole->to(device());
  const auto expected = whole(x);
  const double computing = seconds_of([&] { whole(x); });
  const auto host = torch::empty({layer_bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(on_cuda()));
  auto there = torch::empty({layer_bytes}, at::TensorOptions().dtype(at::kByte).device(device()));
  const double copying_all = seconds_of([&] {
    for (int64_t i = 0; i < depth; ++i) there.copy_(host, /*non_blocking=*/true);
  });

  // Room for four layers: what is needed last stays, the others come and go.
  struct Run {
    double seconds = 0;
    int64_t bytes = 0, hits = 0;  ///< fetched in one forward; of it, units that were on their way when they were needed
  };
  const auto offloaded = [&](std::optional<int64_t> prefetch) {
    Mlp net(width, depth);
    net->eval();
    const auto model = cpu_offload(
        net, {.execution_device = device(), .offload = {.budget_bytes = 4 * layer_bytes + 4096, .prefetch = prefetch}});
    EXPECT_TRUE(same_bits(net(x), expected));
    residency::reset_stats();
    Run run{.seconds = seconds_of([&] { net(x); })};
    run.bytes = residency::stats().bytes_fetched / 6, run.hits = residency::stats().prefetch_hits / 6;
    return run;
  };
  const Run ahead = offloaded({}), without = offloaded(0);
  NEEDS_CUDA("there is nothing to copy");
  const double copying = copying_all * static_cast<double>(ahead.bytes) / static_cast<double>(depth * layer_bytes);
  std::printf("computing %.2f ms, copying %.2f ms (%.1f GB/s), both %.2f ms; without prefetch %.2f ms\n",
              1e3 * computing, 1e3 * copying, 1e-9 * static_cast<double>(ahead.bytes) / copying, 1e3 * ahead.seconds,
              1e3 * without.seconds);
  EXPECT_GT(ahead.bytes, depth * layer_bytes / 2) << "weights must have travelled";
  EXPECT_GT(ahead.hits, depth / 2);
  EXPECT_EQ(without.hits, 0);
}

/// Garbage in memory that was just given back, on the stream that computes.
void litter(const std::vector<int64_t>& sizes) {
  for (const int64_t size : sizes) torch::full({size}, std::numeric_limits<float>::quiet_NaN(), device());
}

/// Small units that come, go and are freed all the time, among allocations of their sizes, and a host that waits for
/// nothing: whatever is read after its memory was given to others, or written before others are done with it, differs.
void expect_no_freed_memory() {
  const at::NoGradGuard no_grad;
  constexpr int64_t kWidth = 64, kDepth = 16;
  constexpr int64_t kUnitBytes = 4 * (kWidth * kWidth + 128);
  std::vector<at::Tensor> inputs, expected;
  {
    Mlp whole(kWidth, kDepth);
    whole->to(device());
    for (uint64_t i = 0; i < 8; ++i) {
      inputs.push_back(numbers({32, kWidth}, i));
      expected.push_back(whole(inputs.back()));
    }
    synchronize();
  }
  const std::vector<int64_t> sizes{kUnitBytes / 4, kWidth * kWidth, 32 * kWidth, kUnitBytes / 4 + 1};
  for (int round = 0; round < (on_gpu() ? 12 : 1); ++round) {
    std::vector<at::Tensor> found;
    {
      Mlp net(kWidth, kDepth);
      const auto model = cpu_offload(
          net, {.execution_device = device(), .offload = {.budget_bytes = (3 + round % 3) * kUnitBytes + 64}});
      for (const auto& input : inputs) {
        at::Tensor x = input;
        for (auto& layer : net->layers) {
          x = torch::tanh(layer(x));
          litter(sizes);
        }
        found.push_back(x);
      }
    }  // the model goes while the device still computes with it
    litter(sizes);
    for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(same_bits(found[i], expected[i])) << "round " << round;
  }
}

TEST_F(GpuStreams, FreedMemoryIsNotRead) { expect_no_freed_memory(); }

TEST_F(GpuStreams, FreedMemoryIsNotReadWhenEachOperatorEvicts) {
  residency::set_paranoid(true);
  expect_no_freed_memory();
}

TEST_F(GpuStreams, FreedMemoryIsNotReadOnAStreamOfTheUsers) {
  if (!on_cuda()) return expect_no_freed_memory();
  const c10::StreamGuard side(
      c10::impl::VirtualGuardImpl(device().type()).getStreamFromGlobalPool(device(), /*isHighPriority=*/false));
  expect_no_freed_memory();
}

/// The same for files, which threads of their own read and send on.
TEST_F(GpuStreams, FreedMemoryIsNotReadFromDisk) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kWidth = 96, kDepth = 10;
  Mlp whole(kWidth, kDepth);
  whole->to(device());
  const auto x = numbers({16, kWidth}, 3);
  const auto expected = whole(x);
  for (uint64_t round = 0; round < 4; ++round) {
    // The first one writes the files, the others read them.
    Mlp net = round == 0 ? Mlp(kWidth, kDepth) : [&] {
      auto empty = init_empty_weights();
      return Mlp(kWidth, kDepth);
    }();
    const auto model =
        disk_offload(net, support::scratch("weights"),
                     {.execution_device = device(),
                      .offload = {.budget_bytes = 3 * 4 * (kWidth * kWidth + 2 * 128), .always_read = true}});
    std::vector<at::Tensor> found;
    for (int pass = 0; pass < 20; ++pass) {
      found.push_back(net(x));
      litter({kWidth * kWidth, kWidth * kWidth + 128});
    }
    for (const auto& one : found) EXPECT_TRUE(same_bits(one, expected)) << "round " << round;
  }
}

}  // namespace
}  // namespace gpu_test
