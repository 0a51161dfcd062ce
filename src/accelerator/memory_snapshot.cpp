#include "accelerate/accelerator/memory_snapshot.hpp"

#include <ATen/DeviceAccelerator.h>

#include <fstream>
#include <limits>

#include "accelerate/residency.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// "VmRSS:     1234 kB" of a file of /proc, in bytes.
int64_t bytes_in_proc(const char* file, const std::string& name) {
  std::ifstream in(file);
  for (std::string word; in >> word; in.ignore(std::numeric_limits<std::streamsize>::max(), '\n'))
    if (int64_t kib = 0; word == name + ":" && in >> kib) return kib * 1024;
  raise<ResourceError>("memory: {} has no line {}, which Linux writes; is /proc mounted?", file, name);
}

template <class F> void for_each_device(F&& f) {
  const auto type = at::getAccelerator();
  if (!type || at::accelerator::deviceCount() == 0) return;
  auto* const allocator = at::getDeviceAllocator(*type);
  for (c10::DeviceIndex i = 0; i < at::accelerator::deviceCount(); ++i)
    f(at::Device(*type, i), allocator->initialized() ? allocator : nullptr);
}

std::string mib(int64_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20)); }

}  // namespace

MemorySnapshot memory() {
  MemorySnapshot now{.resident = bytes_in_proc("/proc/self/status", "VmRSS"),
                     .peak_resident = bytes_in_proc("/proc/self/status", "VmHWM"),
                     .host_total = bytes_in_proc("/proc/meminfo", "MemTotal"),
                     .host_available = bytes_in_proc("/proc/meminfo", "MemAvailable")};
  const auto units = residency::stats();
  now.gathered = units.resident_bytes, now.peak_gathered = units.peak_resident_bytes;
  for_each_device([&](const at::Device& device, c10::DeviceAllocator* allocator) {
    DeviceMemory& memory = now.devices.emplace_back();
    memory.device = device.str();
    if (!allocator) return;
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto stats = allocator->getDeviceStats(device.index());
    memory.allocated = stats.allocated_bytes[kAll].current, memory.peak_allocated = stats.allocated_bytes[kAll].peak;
    memory.reserved = stats.reserved_bytes[kAll].current, memory.peak_reserved = stats.reserved_bytes[kAll].peak;
    try {
      const auto [free, total] = allocator->getMemoryInfo(device.index());
      memory.free = static_cast<int64_t>(free), memory.total = static_cast<int64_t>(total);
    } catch (const c10::NotImplementedError&) {  // this kind of device doesn't say
    }
  });
  return now;
}

void reset_peak_memory() {
  std::ofstream("/proc/self/clear_refs") << "5";
  residency::reset_stats();
  for_each_device([](const at::Device& device, c10::DeviceAllocator* allocator) {
    if (allocator) allocator->resetPeakStats(device.index());
  });
}

std::string MemorySnapshot::text() const {
  std::string text = fmt::format("host: {} resident, {} at most; {} of {} available", mib(resident), mib(peak_resident),
                                 mib(host_available), mib(host_total));
  if (peak_gathered > 0) text += fmt::format("; whole parameters {}, {} at most", mib(gathered), mib(peak_gathered));
  for (const auto& d : devices)
    text += fmt::format("\n{}: {} allocated, {} at most; {} reserved, {} at most; {} of {} free", d.device,
                        mib(d.allocated), mib(d.peak_allocated), mib(d.reserved), mib(d.peak_reserved), mib(d.free),
                        mib(d.total));
  return text;
}

}  // namespace accelerate
