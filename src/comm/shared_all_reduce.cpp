#include "comm/shared_all_reduce.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/average.hpp"
#include "comm/group.hpp"

namespace accelerate::comm {
namespace {

constexpr int64_t kChunk = 1 << 20;  ///< bytes of one rank's area: large against a barrier, small against the last-level cache
constexpr const char* kName = "all_reduce of gradients";

}  // namespace

std::shared_ptr<SharedAllReduce> SharedAllReduce::create(const std::shared_ptr<Group>& group) {
  if (!group) return nullptr;
  const int64_t areas = 2 * (group->world_size() + 1);
  auto memory = SharedMemory::create(group, static_cast<size_t>(areas * kChunk));
  return memory ? std::shared_ptr<SharedAllReduce>(new SharedAllReduce(group, std::move(memory))) : nullptr;
}

bool SharedAllReduce::supports(const at::Tensor& tensor) { return tensor.device().is_cpu() && tensor.is_contiguous() && can_average(tensor.scalar_type()); }

void SharedAllReduce::average_(at::Tensor& tensor, double divisor) {
  const int64_t world = group_->world_size(), rank = group_->rank();
  const auto size = static_cast<int64_t>(tensor.element_size());
  const int64_t chunk = kChunk / size;
  char* data = static_cast<char*>(tensor.mutable_data_ptr());
  std::vector<const void*> inputs(static_cast<size_t>(world));
  for (int64_t from = 0; from < tensor.numel(); from += chunk) {
    const int64_t n = std::min(chunk, tensor.numel() - from);
    char* areas = memory_->data() + (std::exchange(odd_, !odd_) ? (world + 1) * kChunk : 0);
    char* result = areas + world * kChunk;
    std::memcpy(areas + rank * kChunk, data + from * size, static_cast<size_t>(n * size));
    memory_->barrier(kName);
    const int64_t begin = n * rank / world, end = n * (rank + 1) / world;
    for (int64_t r = 0; r < world; ++r) inputs[static_cast<size_t>(r)] = areas + r * kChunk + begin * size;
    average(tensor.scalar_type(), result + begin * size, inputs, end - begin, divisor);
    memory_->barrier(kName);
    std::memcpy(data + from * size, result, static_cast<size_t>(n * size));
  }
}

}  // namespace accelerate::comm
