#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <memory>

#include "residency/spill_file.hpp"

namespace accelerate::optim {

/// Tensors on the CPU whose bytes lie in a file without a name: they are read where they are touched, and the system
/// writes them and takes their memory back when it wants, or when it is told. The file lives as long as one of them.
class PagedMemory {
 public:
  /// @throws as SpillFile
  explicit PagedMemory(const std::filesystem::path& folder);

  /// Contiguous. @throws ResourceError where the disk has no room for it
  at::Tensor zeros(at::IntArrayRef sizes, at::ScalarType dtype) const;

  // These take tensors from zeros():
  /// They will be touched soon.
  static void will_need(const at::Tensor& tensor);
  /// They will not: what they take of this process's memory is given back now.
  static void let_go(const at::Tensor& tensor);

 private:
  std::shared_ptr<residency::SpillFile> file_;
};

}  // namespace accelerate::optim
