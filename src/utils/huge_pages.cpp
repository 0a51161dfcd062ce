#include "utils/huge_pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

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

}  // namespace accelerate
