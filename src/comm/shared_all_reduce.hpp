#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/shared_memory.hpp"

namespace accelerate::comm {

/// Averages tensors over the ranks of one host where they are: in memory that all of them see, in which each rank adds
/// up its share and writes it into everybody's tensor. Blocks; no thread but the caller's works.
class SharedAllReduce {
 public:
  explicit SharedAllReduce(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  /// tensor = sum over ranks / divisor, the same bits on every rank. Collective: the same slot, numel and dtype
  /// everywhere, so all return the same.
  /// @param slot    numbers tensors that are averaged again and again. The first of a size moves into shared memory
  /// with its whole storage (views follow); another one in
  ///                its place is copied there and back.
  /// @return false when nothing was done, because the ranks share no memory or the type or layout is not supported.
  bool average_(size_t slot, at::Tensor& tensor, double divisor);

 private:
  struct Slot {
    std::shared_ptr<SharedMemory> memory;  ///< a slice for each rank
    size_t bytes = 0;                      ///< of a tensor
  };
  std::shared_ptr<Group> group_;
  std::vector<Slot> slots_;
  bool impossible_ = false;
};

}  // namespace accelerate::comm
