#include "residency/buffers.hpp"

#include <ATen/ops/empty.h>

#include "accelerate/utils/memory.hpp"
#include "memory/huge_pages.hpp"
#include "utils/error_text.hpp"
#include "utils/raise.hpp"

namespace accelerate::residency {

at::Tensor Buffers::take(int64_t numel, at::ScalarType dtype, const at::Device& device) {
  const auto found = free_.find({numel, dtype, device.type(), device.index()});
  if (found != free_.end() && !found->second.empty()) {
    at::Tensor flat = std::move(found->second.back());
    found->second.pop_back();
    kept_.add(-static_cast<int64_t>(flat.nbytes()));
    return flat;
  }
  const auto allocate = [&] {
    at::Tensor flat = at::empty({numel}, at::TensorOptions().dtype(dtype).device(device));
    prefer_huge_pages(flat);
    return flat;
  };
  try {
    return allocate();
  } catch (const std::exception& error) {
    if (!should_reduce_batch_size(error)) throw;
    trim();
  }
  try {
    return allocate();
  } catch (const std::exception& error) {
    if (!should_reduce_batch_size(error)) throw;
    raise<ResourceError>(
        "residency: no memory for the {} bytes of a unit on {}; wrap smaller modules, prefetch less, or "
        "lower the batch size. ({})",
        numel * static_cast<int64_t>(c10::elementSize(dtype)), device.str(), text_of(error));
  }
}

void Buffers::give(at::Tensor flat) {
  auto& same = free_[{flat.numel(), flat.scalar_type(), flat.device().type(), flat.device().index()}];
  if (same.size() >= kKept) return;
  kept_.add(static_cast<int64_t>(flat.nbytes()));
  same.push_back(std::move(flat));
}

void Buffers::keep_at_most(int64_t bytes) {
  for (auto& [size, same] : free_)
    while (kept_.bytes() > bytes && !same.empty()) {
      kept_.add(-static_cast<int64_t>(same.back().nbytes()));
      same.pop_back();
    }
}

}  // namespace accelerate::residency
