/// A GPU for machines that have none. Linked into a program of a LibTorch for CPUs, and with
/// ACCELERATE_GPU_REHEARSAL=fake, LibTorch has a CUDA device: operators are computed on the CPU, at once, in memory
/// that the host can't touch (reading or writing it by pointer is a segmentation fault). It shows what lies on the
/// wrong device, and nothing about streams and time.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include "fake_gpu.hpp"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>

namespace {

constexpr auto kType = c10::DeviceType::CUDA;
constexpr size_t kTotalBytes = size_t{8} << 30;  ///< so much memory does the device have

/// Pages that are closed to the host, but while a kernel runs.
class Memory {
 public:
  void* allocate(size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (used_ + bytes > kTotalBytes)
      TORCH_CHECK_WITH(OutOfMemoryError, false, "fake GPU out of memory: tried to allocate ", bytes, " bytes, ", used_,
                       " are in use");
    const size_t length = (bytes + kPage - 1) / kPage * kPage;
    void* begin = ::mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(begin != MAP_FAILED, "fake GPU: mmap");
    blocks_[begin] = {length, bytes, 0};
    used_ += bytes;
    peak_ = std::max(peak_, used_);
    return begin;
  }
  void release(void* begin) {
    const std::lock_guard lock(mutex_);
    const auto block = blocks_.find(begin);
    ::munmap(begin, block->second.length);
    used_ -= block->second.bytes;
    blocks_.erase(block);
  }
  void open(const void* inside, int by) {
    const std::lock_guard lock(mutex_);
    const auto block = find(inside);
    if (block == blocks_.end()) return;
    int& users = block->second.users;
    users += by;
    if (users == (by > 0 ? 1 : 0))
      ::mprotect(block->first, block->second.length, users ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
  bool has(const void* inside) {
    const std::lock_guard lock(mutex_);
    return find(inside) != blocks_.end();
  }
  size_t used() const { return used_; }
  size_t peak() const { return peak_; }
  void reset_peak() { peak_ = used_; }

 private:
  struct Block {
    size_t length, bytes;
    int users;
  };
  static constexpr size_t kPage = 4096;
  std::map<void*, Block>::iterator find(const void* inside) {
    auto next = blocks_.upper_bound(const_cast<void*>(inside));
    if (next == blocks_.begin()) return blocks_.end();
    --next;
    return inside < static_cast<const char*>(next->first) + next->second.length ? next : blocks_.end();
  }
  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  size_t used_ = 0, peak_ = 0;
};

Memory& memory() {
  static auto& only = *new Memory;
  return only;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, 0);
    if (bytes == 0) return {nullptr, device};
    void* data = memory().allocate(bytes);
    return {data, data, &Allocator::release, device};
  }
  static void release(void* data) { memory().release(data); }
  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memory().open(to, 1), memory().open(from, 1);
    std::memcpy(to, from, bytes);
    memory().open(to, -1), memory().open(from, -1);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& all = stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    all.current = static_cast<int64_t>(memory().used());
    all.peak = static_cast<int64_t>(memory().peak());
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { memory().reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {kTotalBytes - memory().used(), kTotalBytes};
  }
};

/// Host memory that counts as pinned.
struct PinnedAllocator final : at::HostAllocator {
  static std::mutex& mutex() {
    static auto& only = *new std::mutex;
    return only;
  }
  static std::map<const char*, size_t>& blocks() {
    static auto& only = *new std::map<const char*, size_t>;
    return only;
  }
  c10::DataPtr allocate(size_t bytes) override {
    auto* data = static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
    const std::lock_guard lock(mutex());
    blocks()[data] = bytes;
    return {data, data, &PinnedAllocator::release, at::kCPU};
  }
  static void release(void* data) {
    const std::lock_guard lock(mutex());
    blocks().erase(static_cast<char*>(data));
    std::free(data);
  }
  static bool has(const void* inside) {
    const std::lock_guard lock(mutex());
    auto next = blocks().upper_bound(static_cast<const char*>(inside));
    if (next == blocks().begin()) return false;
    --next;
    return static_cast<const char*>(inside) < next->first + next->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

struct Generator final : at::CPUGeneratorImpl {
  Generator() { device_ = c10::Device(kType, 0); }
};

bool installed = false;

PinnedAllocator& pinned_allocator() {
  static auto& only = *new PinnedAllocator;
  return only;
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return installed; }
  bool isAvailable() const override { return installed; }
  bool isBuilt() const override { return installed; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return installed; }
  c10::DeviceIndex deviceCount() const override { return installed; }
  c10::DeviceIndex current_device() const override { return installed ? 0 : -1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::has(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return c10::GetAllocator(kType); }
  c10::Device getDeviceFromPtr(void*) const override { return {kType, 0}; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const at::Generator only(c10::make_intrusive<Generator>());
    return only;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::Generator(c10::make_intrusive<Generator>());
  }
};

/// One device; streams and events are numbers, since everything is done when it is asked for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static thread_local c10::StreamId current, next;
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, 0), id); }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(1 + next++ % 32); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(1 + next++ % 32); }
  c10::Stream exchangeStream(c10::Stream s) const override { return stream(std::exchange(current, s.id())); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = this->event();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  static void* event() {
    static int only;
    return &only;
  }
};
thread_local c10::StreamId Guard::current = 0;
thread_local c10::StreamId Guard::next = 0;

/// A tensor's bytes for as long as a kernel runs.
class Opened {
 public:
  explicit Opened(const at::Tensor& tensor) : begin_(tensor.storage().data()) {
    if (begin_) memory().open(begin_, 1);
    view = tensor.is_cpu()
               ? tensor
               : at::from_blob(
                     const_cast<char*>(static_cast<const char*>(begin_)) +
                         tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()),
                     tensor.sizes(), tensor.strides(), [](void*) {}, at::TensorOptions().dtype(tensor.dtype()));
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  ~Opened() {
    if (begin_) memory().open(begin_, -1);
  }
  at::Tensor view;

 private:
  const void* begin_;
};

at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kType),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}
at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool) {
  if (to.numel() == 0) return to;
  const Opened source(from), target(to);
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor view = target.view;
  if (from.is_conj()) view.copy_(source.view.conj());
  else view.copy_(source.view);
  return to;
}
const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  const size_t wanted =
      (static_cast<size_t>(self.numel()) + static_cast<size_t>(self.storage_offset())) * self.itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (wanted > storage->nbytes()) {
    auto* allocator = c10::GetAllocator(kType);
    c10::DataPtr larger = allocator->allocate(wanted);
    if (storage->nbytes() > 0) allocator->copy_data(larger.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(larger));
    storage->set_nbytes(wanted);
  }
  return self;
}
/// How the fallback to the CPU writes what it has changed.
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize_(to, from.sizes(), std::nullopt);
  at::Tensor target = to;
  return copy_(target, from, false);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, strides);
  return self;
}
at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}
void record_stream(at::Tensor& self, c10::Stream) { TORCH_CHECK(self.is_cuda(), "not a device's tensor"); }
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
using at::CUDAHooksArgs;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("record_stream", record_stream);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
}

const bool kAsked = [] {
  const char* rehearsal = std::getenv("ACCELERATE_GPU_REHEARSAL");
  if (!rehearsal || std::string_view(rehearsal) != "fake") return false;
  c10::SetAllocator(kType, new Allocator);  // for good: tensors may outlive what is destroyed at exit
  at::setHostAllocator(kType, &pinned_allocator());
  return installed = true;
}();

}  // namespace

support::OpenToHost::OpenToHost(const void* memory) : memory_(memory) { ::memory().open(memory_, 1); }
support::OpenToHost::~OpenToHost() { ::memory().open(memory_, -1); }
