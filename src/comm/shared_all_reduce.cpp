#include "comm/shared_all_reduce.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/average.hpp"
#include "comm/comms_log.hpp"
#include "comm/group.hpp"
#include "observe/trace.hpp"

namespace accelerate::comm {
namespace {

constexpr size_t kPage = 4096;
constexpr int64_t kBlockBytes = 1 << 16;  ///< bytes: an average is still in the cache when it is written to the peers
constexpr const char* kName = "all_reduce of gradients";

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

bool supports(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.is_contiguous() && tensor.numel() > 0 && can_average(tensor.scalar_type());
}

/// The tensor's storage lies at `place` from now on, of which `memory` is the owner.
void move_storage(at::Tensor& tensor, char* place, const std::shared_ptr<SharedMemory>& memory) {
  const c10::Storage& storage = tensor.storage();
  if (storage.nbytes() > whole_pages(tensor.nbytes()) || tensor.storage_offset() != 0) return;
  std::memcpy(place, storage.data(), storage.nbytes());
  using Owner = std::shared_ptr<SharedMemory>;
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(
      place, new Owner(memory), [](void* owner) { delete static_cast<Owner*>(owner); }, at::kCPU));
}

}  // namespace

bool SharedAllReduce::average_(size_t slot, at::Tensor& tensor, double divisor) {
  if (impossible_ || !supports(tensor)) return false;
  const int64_t world = group_->world_size(), rank = group_->rank();
  const auto size = static_cast<int64_t>(tensor.element_size());
  const size_t bytes = tensor.nbytes();
  if (slot >= slots_.size()) slots_.resize(slot + 1);
  Slot& place = slots_[slot];
  const auto slice = [&](int64_t r) { return place.memory->data() + static_cast<size_t>(r) * whole_pages(bytes); };
  if (place.bytes != bytes) {
    place = {.memory = SharedMemory::create(group_, static_cast<size_t>(world) * whole_pages(bytes)), .bytes = bytes};
    impossible_ = !place.memory;
    if (impossible_) return false;
    move_storage(tensor, slice(rank), place.memory);
  }
  const LoggedScope logged(Collective::all_reduce, static_cast<int64_t>(bytes), *group_);
  const trace::Span span(trace::label_of(kName, static_cast<int64_t>(bytes)), trace::Lane::thread);
  char* data = static_cast<char*>(tensor.mutable_data_ptr());
  char* mine = slice(rank);
  if (data != mine) std::memcpy(mine, data, bytes);
  place.memory->barrier(kName);
  const int64_t begin = tensor.numel() * rank / world, end = tensor.numel() * (rank + 1) / world;
  std::vector<const void*> inputs(static_cast<size_t>(world));
  for (int64_t from = begin; from < end; from += kBlockBytes / size) {
    const int64_t n = std::min(kBlockBytes / size, end - from), at = from * size;
    for (int64_t r = 0; r < world; ++r) inputs[static_cast<size_t>(r)] = slice(r) + at;
    average(tensor.scalar_type(), mine + at, inputs, n, divisor);
    for (int64_t r = 0; r < world; ++r)
      if (r != rank) std::memcpy(slice(r) + at, mine + at, static_cast<size_t>(n * size));
  }
  place.memory->barrier(kName);
  if (data != mine) std::memcpy(data, mine, bytes);
  return true;
}

}  // namespace accelerate::comm
