#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "comm/shared_memory.hpp"

namespace accelerate::comm {

/// Averages tensors over the ranks of one host through memory that all of them see: each rank adds up its share of every chunk. Blocks; no thread but the caller's works.
class SharedAllReduce {
 public:
  /// Collective. Null on all ranks when there is no shared memory.
  static std::shared_ptr<SharedAllReduce> create(const std::shared_ptr<Group>& group);

  static bool supports(const at::Tensor& tensor);
  /// tensor = sum over ranks / divisor, the same bits on every rank. Collective: the same numel and dtype everywhere.
  void average_(at::Tensor& tensor, double divisor);

 private:
  SharedAllReduce(std::shared_ptr<Group> group, std::shared_ptr<SharedMemory> memory) : group_(std::move(group)), memory_(std::move(memory)) {}
  std::shared_ptr<Group> group_;
  std::shared_ptr<SharedMemory> memory_;
  int64_t odd_ = 0;  ///< the set of areas that the next chunk uses: two in turn, so that one barrier a chunk is enough
};

}  // namespace accelerate::comm
