/// How much memory a training takes: foretold, and where there is too little of it.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>

#include "counting_allocator.hpp"
#include "gpu.hpp"

namespace gpu_test {
namespace {

using namespace accelerate;

class GpuMemory : public GpuTest {};

/// The device's allocator; in a rehearsal the CPU's.
int64_t held() {
  return on_cuda() ? at::accelerator::getDeviceStats(device().index()).allocated_bytes[0].current
                   : support::CountingAllocator::install().live();
}
int64_t peak() {
  return on_cuda() ? at::accelerator::getDeviceStats(device().index()).allocated_bytes[0].peak
                   : support::CountingAllocator::install().peak();
}
void reset_peak() {
  if (on_cuda()) at::accelerator::resetPeakStats(device().index());
  else support::CountingAllocator::install().reset_peak();
}

void train_once(int64_t width, int64_t depth) {
  Accelerator accelerator;
  Mlp net = nullptr;
  {
    const auto empty = init_empty_weights();
    net = Mlp(width, depth);
  }
  auto [m, optimizer] = accelerator.prepare(net, torch::optim::AdamW(net->parameters(), 1e-3));
  const auto x = torch::ones({8, width}, accelerator.device());
  for (int step = 0; step < 3; ++step) {
    accelerator.backward(loss_of(m(x)));
    optimizer.step();
    optimizer.zero_grad();
  }
}

/// Many layers, so that what one of them needs besides is small: the temporaries of the plain optimizer step, which
/// the dry run counts and fused kernels do without, and cuBLAS's workspace of 32 MiB, which it does not know.
TEST_F(GpuMemory, DryRunForetellsThePeak) {
  const int64_t width = on_gpu() ? 2048 : 256, depth = 96;
  train_once(64, 2);  // what libraries keep for themselves is there from now on
  start_again();
  synchronize();
  const int64_t before = held();
  reset_peak();
  train_once(width, depth);
  synchronize();
  const auto real = static_cast<double>(peak() - before);
  start_again();
  const auto report = dry_run({.num_processes = 1}, [&](const DryRunMark& mark) {
    train_once(width, depth);
    mark("all");
  });
  const auto foretold = static_cast<double>(report.peak_bytes());
  std::printf("peak %.1f MB, foretold %.1f MB\n", 1e-6 * real, 1e-6 * foretold);
  EXPECT_NEAR(foretold, real, 0.02 * real);
  const double parameters = 4.0 * static_cast<double>(depth * (width * width + width));
  EXPECT_GT(real, 4 * parameters) << "parameters, gradients and two moments";
}

TEST_F(GpuMemory, NothingIsLeftBehind) {
  train_once(256, 4);  // what libraries keep for themselves stays
  start_again();
  synchronize();
  const int64_t before = held();
  for (int i = 0; i < 3; ++i) {
    train_once(256, 4);
    start_again();
  }
  synchronize();
  EXPECT_EQ(held(), before);
}

TEST_F(GpuMemory, TooLargeBatchesAreMadeSmallerAfterARealOutOfMemory) {
  NEEDS_CUDA("a system that promises more memory than it has gives no error to find");
  const auto total = static_cast<int64_t>(at::accelerator::getMemoryInfo(device().index()).second);
  const int64_t before = held();
  std::vector<int64_t> tried;
  const int64_t found = find_executable_batch_size(
      [&](int64_t size) {
        tried.push_back(size);
        // Something is in use already when memory runs out, and must be free for the next try.
        const auto first = torch::empty({size, total / 256}, at::TensorOptions().dtype(at::kByte).device(device()));
        const auto rest = torch::empty({size, total / 64}, at::TensorOptions().dtype(at::kByte).device(device()));
        return size;
      },
      {.starting_batch_size = 128, .reduce_batch_size_fn = [](int64_t size) { return size / 2; }});
  EXPECT_EQ(tried.front(), 128);
  EXPECT_LE(found, 32) << "64 samples are more than all there is";
  EXPECT_GE(found, 1);
  EXPECT_EQ(held(), before);
  EXPECT_THROW(find_executable_batch_size(
                   [&](int64_t) {
                     torch::empty({2 * total}, at::TensorOptions().dtype(at::kByte).device(device()));
                     return 0;
                   },
                   4),
               ResourceError);
}

TEST_F(GpuMemory, SnapshotsSayWhatTheDeviceHolds) {
  const auto here = [] {
    for (const auto& one : memory().devices)
      if (one.device == device().str()) return one;
    return DeviceMemory{};
  };
  constexpr int64_t kBytes = int64_t{64} << 20;  // far above what the allocator rounds up to
  at::zeros({1}, device());                      // which exists from now on
  reset_peak_memory();
  const DeviceMemory before = here();
  at::Tensor tensor = at::empty({kBytes}, at::TensorOptions().dtype(at::kByte).device(device()));
  const DeviceMemory during = here();
  release_memory(tensor);
  const DeviceMemory after = here();
  reset_peak_memory();
  const DeviceMemory again = here();
  if (!on_cuda()) {
    EXPECT_THAT(memory().devices, testing::IsEmpty()) << "the CPU is the host";
    return;
  }
  EXPECT_EQ(before.device, device().str());
  EXPECT_EQ(during.allocated, before.allocated + kBytes);
  EXPECT_EQ(after.allocated, before.allocated);
  EXPECT_GE(after.peak_allocated, during.allocated);
  EXPECT_EQ(again.peak_allocated, again.allocated);
  if (!on_gpu()) return;  // the fake GPU keeps nothing for later, and has no size
  EXPECT_GE(during.reserved, during.allocated);
  EXPECT_LT(after.reserved, during.reserved) << "release_memory empties the cache";
  EXPECT_GT(during.total, during.free);
  EXPECT_GT(during.free, 0);
}

TEST_F(GpuMemory, ClearingTheCacheGivesMemoryBack) {
  NEEDS_CUDA("the CPU's allocator has no cache");
  const auto free_bytes = [] { return at::accelerator::getMemoryInfo(device().index()).first; };
  clear_device_cache();
  const auto before = free_bytes();
  torch::empty({int64_t{1} << 30}, at::TensorOptions().dtype(at::kByte).device(device()));
  EXPECT_LT(free_bytes(), before) << "the allocator keeps it";
  clear_device_cache();
  EXPECT_GE(free_bytes() + (64 << 20), before) << "others may use the device, too";
}

}  // namespace
}  // namespace gpu_test
