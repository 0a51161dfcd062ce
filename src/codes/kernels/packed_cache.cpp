#include "codes/kernels/packed_cache.hpp"

#include <mutex>

#include "accelerate/codes/kernels.hpp"
#include "codes/kernels/packed.hpp"

namespace accelerate::codes {

struct PackedCache {
  std::mutex mutex;
  std::shared_ptr<const kernels::Packed> packed;
  // What it was made of. Copies of codes share a cache, and a copy may be given other data.
  at::Tensor data, scales;
  uint32_t version = 0;
};

namespace {

uint32_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

}  // namespace

std::shared_ptr<PackedCache> new_packed_cache() { return std::make_shared<PackedCache>(); }

void drop_packed(const Codes& codes) {
  const std::lock_guard lock(codes.packed->mutex);
  codes.packed->packed.reset();
  codes.packed->data = codes.packed->scales = at::Tensor();
}

int64_t packed_bytes(const Codes& codes) {
  const std::lock_guard lock(codes.packed->mutex);
  const auto& packed = codes.packed->packed;
  if (!packed) return 0;
  return packed->codes.numel() + (packed->scales.defined() ? packed->scales.numel() * 4 : 0);
}

std::shared_ptr<const kernels::Packed> kernels::packed_of(const Codes& codes) {
  auto& cache = *codes.packed;
  const std::lock_guard lock(cache.mutex);
  const uint32_t version = version_of(codes.data);
  const bool is_fresh =
      cache.packed && cache.data.is_same(codes.data) && cache.scales.is_same(codes.scales) && cache.version == version;
  if (is_fresh) return cache.packed;
  auto packed = pack(codes);
  if (!packed) return nullptr;
  cache.packed = std::make_shared<const Packed>(std::move(*packed));
  cache.data = codes.data, cache.scales = codes.scales, cache.version = version;
  return cache.packed;
}

}  // namespace accelerate::codes
