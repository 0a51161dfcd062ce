/// memory() on a device, and giving memory back.
#include <accelerate/accelerate.hpp>

#include <gmock/gmock.h>

#include "gpu.hpp"

namespace gpu_test {
namespace {

using namespace accelerate;

class GpuMemorySnapshot : public GpuTest {};

constexpr int64_t kMiB = 1 << 20;

TEST_F(GpuMemorySnapshot, FollowsTheDevicesAllocator) {
  NEEDS_DEVICE("there is no device");
  auto first = torch::ones({kMiB}, device());  // the allocator begins with the first tensor
  reset_peak_memory();
  const auto before = memory();
  ASSERT_FALSE(before.devices.empty());
  const auto index = static_cast<size_t>(std::max<int64_t>(device().index(), 0));
  EXPECT_EQ(before.devices[index].device, at::Device(device().type(), static_cast<c10::DeviceIndex>(index)).str());
  EXPECT_GE(before.devices[index].allocated, 4 * kMiB);
  auto second = torch::ones({8 * kMiB}, device());
  const auto full = memory().devices[index];
  EXPECT_EQ(full.allocated - before.devices[index].allocated, 32 * kMiB);
  EXPECT_GE(full.total, full.free + full.allocated);
  release_memory(first, second);
  const auto after = memory().devices[index];
  EXPECT_EQ(after.allocated, before.devices[index].allocated - 4 * kMiB);
  EXPECT_EQ(after.peak_allocated, full.allocated);
  if (on_gpu()) {
    EXPECT_GE(full.reserved, full.allocated);
    EXPECT_LT(after.reserved, full.reserved);  // the cache is given back
    EXPECT_GE(after.peak_reserved, full.reserved);
  }
  reset_peak_memory();
  EXPECT_EQ(memory().devices[index].peak_allocated, after.allocated);
  EXPECT_THAT(memory().text(), testing::HasSubstr("\n" + before.devices[index].device + ": "));
}

TEST_F(GpuMemorySnapshot, SaysWhatIsOffloadedToTheHost) {
  NEEDS_DEVICE("there is no device");
  const auto before = memory().offloaded_host;
  torch::nn::Linear network(256, 256);
  const auto bytes = static_cast<int64_t>(network->weight.nbytes() + network->bias.nbytes());
  {
    const auto model = cpu_offload(network, {.execution_device = device()});
    EXPECT_GE(memory().offloaded_host - before, bytes);
    EXPECT_LE(memory().offloaded_host - before, bytes + 1024) << "but for alignment";
  }
  EXPECT_EQ(memory().offloaded_host, before);
}

TEST_F(GpuMemorySnapshot, TheDeviceIsAvailable) {
  EXPECT_EQ(is_cuda_available(), on_cuda());
  EXPECT_EQ(is_device_available(device().is_cpu() ? "cpu" : "cuda"), true);
  EXPECT_TRUE(is_bf16_available());
}

}  // namespace
}  // namespace gpu_test
