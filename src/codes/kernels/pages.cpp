#include "codes/kernels/pages.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>

#include "utils/huge_pages.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::codes::kernels {
namespace {

/// Addresses that begin at a huge page. Memory comes when it is written to.
class Block {
 public:
  explicit Block(int64_t bytes) : bytes_(bytes + kHugePage) {
    memory_ = ::mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED)
      raise<ResourceError>("codes: there are no {} bytes of memory for codes in the order of products.", bytes);
    const auto address = reinterpret_cast<uintptr_t>(memory_);
    begin_ = static_cast<char*>(memory_) + ((address + kHugePage - 1) / kHugePage * kHugePage - address);
    prefer_huge_pages(begin_, bytes);
  }
  ~Block() { ::munmap(memory_, static_cast<size_t>(bytes_)); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  char* begin() const { return begin_; }

 private:
  int64_t bytes_;
  void* memory_;
  char* begin_;
};

Mutex mutex;
std::weak_ptr<Block> current
    ACCELERATE_GUARDED_BY(mutex);  ///< what small tensors are put into, while one has some of it
int64_t used ACCELERATE_GUARDED_BY(mutex) = 0;

}  // namespace

at::Tensor empty_in_huge_pages(at::IntArrayRef sizes, at::ScalarType dtype) {
  constexpr int64_t kBlock = 64 << 20, kLine = 64;
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  if (bytes < 4096) return at::empty(sizes, at::TensorOptions().dtype(dtype));
  std::shared_ptr<Block> block;
  int64_t offset = 0;
  {
    const MutexLock lock(mutex);
    block = current.lock();
    if (!block || used + bytes > kBlock) {
      block = std::make_shared<Block>(std::max(bytes, kBlock));
      current = block, used = 0;
    }
    offset = used;
    used += (bytes + kLine - 1) / kLine * kLine;
  }
  char* const begin = block->begin() + offset;
  return at::from_blob(
      begin, sizes, [block, begin, bytes](void*) { give_pages_back(begin, bytes); }, at::TensorOptions().dtype(dtype));
}

}  // namespace accelerate::codes::kernels
