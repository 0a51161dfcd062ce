#include "accelerate/accelerator/memory_snapshot.hpp"

#include <ATen/DeviceAccelerator.h>

#include <fstream>
#include <limits>
#include <unordered_set>
#include <utility>

#include "accelerate/residency.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "memory/held_bytes.hpp"
#include "optim/optimizer_state.hpp"
#include "residency/member.hpp"
#include "run_state/holdings.hpp"
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

/// Each counts once.
class Storages {
 public:
  explicit Storages(int64_t& on_host) : on_host_(on_host) {}

  int64_t count(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.is_meta()) return 0;
    const auto* const storage = tensor.storage().unsafeGetStorageImpl();
    return seen_.insert(storage).second ? add(tensor, storage->nbytes()) : 0;
  }
  /// Adds a tensor that is one of many in its storage, which other ranks may share.
  int64_t count_piece(const at::Tensor& piece) { return piece.defined() ? add(piece, piece.nbytes()) : 0; }

 private:
  int64_t add(const at::Tensor& tensor, size_t bytes) {
    if (tensor.is_meta()) return 0;
    if (tensor.is_cpu()) on_host_ += static_cast<int64_t>(bytes);
    return static_cast<int64_t>(bytes);
  }

  int64_t& on_host_;
  std::unordered_set<const c10::StorageImpl*> seen_;
};

std::string mib(int64_t bytes) { return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20)); }

}  // namespace

MemorySnapshot memory() {
  MemorySnapshot now{.resident = bytes_in_proc("/proc/self/status", "VmRSS"),
                     .peak_resident = bytes_in_proc("/proc/self/status", "VmHWM"),
                     .host_total = bytes_in_proc("/proc/meminfo", "MemTotal"),
                     .host_available = bytes_in_proc("/proc/meminfo", "MemAvailable")};
  const auto units = residency::stats();
  now.gathered = units.resident_bytes, now.peak_gathered = units.peak_resident_bytes;
  now.offloaded_host = HeldBytes::of_process(HeldFor::offloaded_host);
  now.offloaded_file = HeldBytes::of_process(HeldFor::offloaded_file);
  now.communication = HeldBytes::of_process(HeldFor::communication);
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

MemorySnapshot Accelerator::memory() const {
  MemorySnapshot now = accelerate::memory();
  ModelMemory& models = now.models.emplace();
  Storages storages(models.on_host);
  impl_->for_each_held([&](ProfileStorage::Kind kind, const at::Tensor& tensor, bool is_piece) {
    int64_t& bytes = kind == ProfileStorage::Kind::parameter  ? models.parameters
                     : kind == ProfileStorage::Kind::gradient ? models.gradients
                                                              : models.optimizer;
    bytes += is_piece ? storages.count_piece(tensor) : storages.count(tensor);
  });
  return now;
}

void Accelerator::Impl::for_each_held(
    const std::function<void(ProfileStorage::Kind, const at::Tensor&, bool is_piece)>& f) const {
  using Kind = ProfileStorage::Kind;
  for (const auto& model : run.models)
    for (const auto& holding : run_state::holdings_of(*model)) {
      if (holding.in_pieces()) {
        f(Kind::parameter, holding.value, true);
        if (const auto gradient = holding.engine->gradient(holding.tensor)) f(Kind::gradient, gradient->value, true);
      } else {
        // A tensor that comes and goes counts as gathered.
        if (!residency::Member::of(holding.tensor)) f(Kind::parameter, holding.tensor, false);
        f(Kind::gradient, holding.tensor.grad(), false);
      }
    }
  for (const auto& optimizer : run.optimizers)
    optim::map_optimizer_state(optimizer.optimizer(), [&](const at::Tensor& state) {
      f(Kind::optimizer_state, state, false);
      return state;
    });
}

std::vector<ProfileStorage> Accelerator::Impl::storages() const {
  std::vector<ProfileStorage> all;
  for_each_held([&](ProfileStorage::Kind kind, const at::Tensor& tensor, bool) {
    if (tensor.defined() && tensor.has_storage() && !tensor.is_meta() && tensor.storage().data())
      all.push_back({tensor.storage().data(), kind});
  });
  return all;
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
  if (models)
    text += fmt::format("\nmodels: parameters {}, gradients {}, optimizer {}", mib(models->parameters),
                        mib(models->gradients), mib(models->optimizer));
  for (const auto& [name, bytes] :
       {std::pair("offloaded to the host", offloaded_host), std::pair("offloaded to files", offloaded_file),
        std::pair("buffers of communication", communication)})
    if (bytes > 0) text += fmt::format("; {} {}", name, mib(bytes));
  for (const auto& d : devices)
    text += fmt::format("\n{}: {} allocated, {} at most; {} reserved, {} at most; {} of {} free", d.device,
                        mib(d.allocated), mib(d.peak_allocated), mib(d.reserved), mib(d.peak_reserved), mib(d.free),
                        mib(d.total));
  return text;
}

}  // namespace accelerate
