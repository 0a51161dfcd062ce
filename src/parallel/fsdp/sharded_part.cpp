#include "parallel/fsdp/sharded_part.hpp"

#include <algorithm>

namespace accelerate::parallel {

void ShardedPart::cut(int64_t rank, int64_t world) {
  const int64_t length = layout.numel / world, first = rank * length, last = first + length;
  for (size_t i = 0; i < members.size(); ++i) {
    const int64_t begin = layout.offsets[i], end = begin + members[i].second.numel();
    const int64_t from = std::clamp(begin, first, last), to = std::clamp(end, first, last);
    at::Tensor shard = master.narrow(0, from - first, to - from).detach();
    shards.push_back(trained ? shard.requires_grad_() : shard);
    begins.push_back(from - begin);
  }
}

}  // namespace accelerate::parallel
