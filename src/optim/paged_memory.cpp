#include "optim/paged_memory.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/accumulate.h>
#include <sys/mman.h>

#include <cstring>

namespace accelerate::optim {

PagedMemory::PagedMemory(const std::filesystem::path& folder)
    : file_(std::make_shared<residency::SpillFile>(
          folder, residency::SpillFile::Wording{.user = "paged optimizer states",
                                                .contents = "the optimizer's states",
                                                .advice = "or name another folder by paging_folder"})) {}

at::Tensor PagedMemory::zeros(at::IntArrayRef sizes, at::ScalarType dtype) const {
  const auto options = at::TensorOptions().dtype(dtype);
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  if (bytes == 0) return at::empty(sizes, options);
  const int64_t offset = file_->reserve(bytes);
  void* const memory = file_->map(offset, bytes);
  std::memset(memory, 0, static_cast<size_t>(bytes));  // others' bytes may have been there
  ::madvise(memory, static_cast<size_t>(bytes), MADV_DONTNEED);
  return at::from_blob(
      memory, sizes,
      [file = file_, offset, bytes](void* from) {
        ::munmap(from, static_cast<size_t>(bytes));
        file->release(offset, bytes);
      },
      options);
}

void PagedMemory::will_need(const at::Tensor& tensor) {
  if (tensor.nbytes() > 0) ::madvise(tensor.mutable_data_ptr(), tensor.nbytes(), MADV_WILLNEED);
}

void PagedMemory::let_go(const at::Tensor& tensor) {
  if (tensor.nbytes() > 0) ::madvise(tensor.mutable_data_ptr(), tensor.nbytes(), MADV_DONTNEED);
}

}  // namespace accelerate::optim
