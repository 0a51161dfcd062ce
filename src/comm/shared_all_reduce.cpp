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
  const int64_t chunk = kChunk / size, numel = tensor.numel(), chunks = (numel + chunk - 1) / chunk;
  char* data = static_cast<char*>(tensor.mutable_data_ptr());
  const auto length = [&](int64_t c) { return std::min(chunk, numel - c * chunk); };
  // Chunks go through two sets of areas in turn, also from call to call.
  const auto areas = [&](int64_t c) { return memory_->data() + ((odd_ + c) % 2) * (world + 1) * kChunk; };
  const auto copy_in = [&](int64_t c) { std::memcpy(areas(c) + rank * kChunk, data + c * chunk * size, static_cast<size_t>(length(c) * size)); };
  std::vector<const void*> inputs(static_cast<size_t>(world));
  if (chunks > 0) {
    copy_in(0);
    memory_->barrier(kName);
  }
  for (int64_t c = 0; c < chunks; ++c) {
    const int64_t n = length(c), begin = n * rank / world, end = n * (rank + 1) / world;
    char* result = areas(c) + world * kChunk;
    for (int64_t r = 0; r < world; ++r) inputs[static_cast<size_t>(r)] = areas(c) + r * kChunk + begin * size;
    average(tensor.scalar_type(), result + begin * size, inputs, end - begin, divisor);
    if (c + 1 < chunks) copy_in(c + 1);  // nobody reads that set any more: all have left the barrier behind its averages
    memory_->barrier(kName);
    std::memcpy(data + c * chunk * size, result, static_cast<size_t>(n * size));
  }
  odd_ = (odd_ + chunks) % 2;
}

}  // namespace accelerate::comm
