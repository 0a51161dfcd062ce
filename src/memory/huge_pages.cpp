#include "memory/huge_pages.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>
#include <dlfcn.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate {
namespace {

/// Advice for the part of a range that whole pages of `page` bytes make up.
void advise(const void* begin, int64_t bytes, int64_t page, int advice) {
  const auto first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page,
             end = (reinterpret_cast<uintptr_t>(begin) + bytes) / page * page;
  if (first < end)
    ::madvise(reinterpret_cast<void*>(first), end - first, advice);  // only ever a loss of speed when it fails
}

}  // namespace

void prefer_huge_pages(const void* begin, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  advise(begin, bytes, kHugePage, MADV_HUGEPAGE);
#else
  static_cast<void>(begin), static_cast<void>(bytes);
#endif
}

void prefer_huge_pages(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.has_storage())
    prefer_huge_pages(tensor.storage().data(), static_cast<int64_t>(tensor.storage().nbytes()));
}

void give_pages_back(void* begin, int64_t bytes) { advise(begin, bytes, ::sysconf(_SC_PAGESIZE), MADV_DONTNEED); }

void give_freed_memory_back() {
  // jemalloc, in programs that have it in the place of the C library's allocator.
  using Control = int (*)(const char*, void*, size_t*, void*, size_t);
  static const auto control = reinterpret_cast<Control>(::dlsym(RTLD_DEFAULT, "mallctl"));
  if (control) control("arena.4096.purge", nullptr, nullptr, nullptr, 0);  // 4096: of all arenas
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

namespace {

/// Addresses that begin at a huge page. Memory comes when it is written to.
class PageBlock {
 public:
  explicit PageBlock(int64_t bytes) : bytes_(bytes + kHugePage) {
    memory_ = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) raise<ResourceError>("there are no {} bytes of memory.", bytes);
    const auto address = reinterpret_cast<uintptr_t>(memory_);
    begin_ = static_cast<char*>(memory_) + ((address + kHugePage - 1) / kHugePage * kHugePage - address);
    prefer_huge_pages(begin_, bytes);
  }
  ~PageBlock() { ::munmap(memory_, static_cast<size_t>(bytes_)); }
  PageBlock(const PageBlock&) = delete;
  PageBlock& operator=(const PageBlock&) = delete;

  char* begin() const { return begin_; }

 private:
  int64_t bytes_;
  void* memory_;
  char* begin_;
};

Mutex mutex;
/// The block for small tensors, while one of them lives.
std::weak_ptr<PageBlock> current ACCELERATE_GUARDED_BY(mutex);
int64_t used ACCELERATE_GUARDED_BY(mutex) = 0;

}  // namespace

at::Tensor empty_in_huge_pages(at::IntArrayRef sizes, at::ScalarType dtype) {
  constexpr int64_t kBlock = 64 << 20, kAlone = kBlock / 8, kLine = 64;
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  if (bytes < 1 << 16) return at::empty(sizes, at::TensorOptions().dtype(dtype));
  std::shared_ptr<PageBlock> block;
  int64_t offset = 0;
  if (bytes >= kAlone) {  // what does not fit would leave a block's last page, all of it, behind
    block = std::make_shared<PageBlock>(bytes);
  } else {
    const MutexLock lock(mutex);
    block = current.lock();
    if (!block || used + bytes > kBlock) {
      block = std::make_shared<PageBlock>(kBlock);
      current = block, used = 0;
    }
    offset = used;
    used += (bytes + kLine - 1) / kLine * kLine;
  }
  char* const begin = block->begin() + offset;
  return at::from_blob(
      begin, sizes, [block, begin, bytes](void*) { give_pages_back(begin, bytes); }, at::TensorOptions().dtype(dtype));
}

}  // namespace accelerate
