#include "codes/kernels/packed_cache.hpp"

#include <ATen/ops/empty.h>

#include "accelerate/codes/kernels.hpp"
#include "codes/kernels/packed.hpp"
#include "memory/huge_pages.hpp"
#include "utils/raise.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::codes {

struct PackedCache {
  Mutex mutex;
  std::shared_ptr<const kernels::Packed> packed ACCELERATE_GUARDED_BY(mutex);
  /// The data that it was made of: copies of codes share a cache, and a copy may be given other data. For codes that
  /// are kept once it is the data itself, while there is no `packed`.
  at::Tensor data ACCELERATE_GUARDED_BY(mutex), scales ACCELERATE_GUARDED_BY(mutex);
  uint32_t version ACCELERATE_GUARDED_BY(mutex) = 0;
  // Set before others see the cache.
  at::Tensor stands_for;  ///< of codes that are kept once: the tensor without memory that is their data
  bool in_file = false;   ///< pages of the data are given back once it has been packed
};

namespace {

uint32_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

at::Tensor without_memory(const at::Tensor& tensor) {
  return at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
}

/// Scales that a packed form has as they are.
bool has_scales(const Codes& codes) { return is_four_bit(codes.encoding) && !codes.nested; }

PackedCache& cache_of(const Codes& codes) {
  if (!kernels::is_kept_once(codes))
    throw ShapeError("codes: the data is on the meta device, and is not kept elsewhere; expected data on the CPU");
  return *codes.packed;
}

/// Codes that are kept once, and not packed, with their data.
Codes with_data(const Codes& codes, const at::Tensor& data, const at::Tensor& scales) {
  Codes plain = codes;
  plain.packed = new_packed_cache();
  plain.data = data;
  if (has_scales(codes)) plain.scales = scales;
  return plain;
}

/// Codes with the data of rows of a packed form.
Codes unpack_rows(const Codes& codes, const kernels::Packed& packed, int64_t first, int64_t count) {
  const bool all = first == 0 && count == codes.rows();
  Codes rows{.encoding = codes.encoding,
             .shape = all ? codes.shape : std::vector<int64_t>{count, codes.columns()},
             .dtype = codes.dtype,
             .block_size = codes.block_size};
  std::vector<int64_t> sizes = codes.data.sizes().vec();
  if (is_four_bit(codes.encoding)) sizes = {count * codes.columns() / 2, 1};
  else if (!all) sizes = {count, codes.data.numel() / codes.rows()};
  rows.data = at::empty(sizes, codes.data.options().device(at::kCPU));
  kernels::unpack(packed, first, count, rows.data.mutable_data_ptr());
  if (all && !has_scales(codes)) rows.scales = codes.scales, rows.nested = codes.nested;
  else if (codes.encoding == Encoding::int8_rowwise) rows.scales = codes.scales.narrow(0, first, count);
  else if (packed.scales.defined()) rows.scales = kernels::unpacked_scales(packed, first, count);
  return rows;
}

}  // namespace

std::shared_ptr<PackedCache> new_packed_cache() { return std::make_shared<PackedCache>(); }

bool keep_once(Codes& codes, bool in_file) {
  check(codes, "keep_once");
  if (kernels::is_kept_once(codes)) return true;
  if (codes.numel() == 0 || !kernels::can_be_packed(codes)) return false;
  codes.packed = new_packed_cache();  // copies from before have data, and a cache, of their own
  codes.packed->in_file = in_file;
  if (in_file) return true;
  {
    const MutexLock lock(codes.packed->mutex);
    codes.packed->data = codes.data;
    if (has_scales(codes)) codes.packed->scales = codes.scales;
  }
  codes.data = codes.packed->stands_for = without_memory(codes.data);
  if (has_scales(codes)) codes.scales = without_memory(codes.scales);
  return true;
}

Codes unpacked(const Codes& codes) { return kernels::rows_of(codes, 0, codes.rows()).codes; }

void drop_packed(const Codes& codes) {
  if (!codes.packed) return;
  const bool once = kernels::is_kept_once(codes);
  const Codes plain = once ? unpacked(codes) : Codes();
  const MutexLock lock(codes.packed->mutex);
  codes.packed->packed.reset();
  codes.packed->data = plain.data;
  codes.packed->scales = once && has_scales(codes) ? plain.scales : at::Tensor();
}

int64_t packed_bytes(const Codes& codes) {
  if (!codes.packed) return 0;
  const MutexLock lock(codes.packed->mutex);
  const kernels::Packed* const packed = codes.packed->packed.get();
  if (!packed) return 0;
  return packed->codes.numel() + (packed->scales.defined() ? packed->scales.numel() * 4 : 0);
}

bool kernels::is_kept_once(const Codes& codes) {
  return codes.data.defined() && codes.data.is_meta() && codes.packed && codes.packed->stands_for.is_same(codes.data);
}

std::optional<Codes> kernels::plain_of(const Codes& codes) {
  if (!codes.data.is_meta()) {
    if (!codes.packed || !codes.packed->in_file) return codes;
    const MutexLock lock(codes.packed->mutex);  // once packed, pages of the file would only come back
    return codes.packed->packed && codes.packed->data.is_same(codes.data) ? std::nullopt : std::optional(codes);
  }
  auto& cache = cache_of(codes);
  const MutexLock lock(cache.mutex);
  if (cache.packed) return std::nullopt;
  return with_data(codes, cache.data, cache.scales);
}

kernels::Rows kernels::rows_of(const Codes& codes, int64_t first, int64_t count) {
  if (auto plain = plain_of(codes)) return {*std::move(plain), first};
  return {unpack_rows(codes, *packed_of(codes), first, count), 0};
}

std::shared_ptr<const kernels::Packed> kernels::packed_of(const Codes& codes) {
  if (!codes.packed) return nullptr;
  auto& cache = *codes.packed;
  if (codes.data.is_meta()) {
    cache_of(codes);
    const MutexLock lock(cache.mutex);
    if (!cache.packed) {
      cache.packed = std::make_shared<const Packed>(*pack(with_data(codes, cache.data, cache.scales)));
      cache.data = cache.scales = at::Tensor();
    }
    return cache.packed;
  }
  const auto fresh = [&]() -> std::shared_ptr<const Packed> {
    auto packed = pack(codes);
    return packed ? std::make_shared<const Packed>(std::move(*packed)) : nullptr;
  };
  if (cache.stands_for.defined()) return fresh();  // a copy of codes that are kept once was given data of its own
  const MutexLock lock(cache.mutex);
  const uint32_t version = version_of(codes.data);
  if (cache.packed && cache.data.is_same(codes.data) && cache.scales.is_same(codes.scales) && cache.version == version)
    return cache.packed;
  auto packed = fresh();
  if (!packed) return nullptr;
  cache.packed = std::move(packed);
  cache.data = codes.data, cache.scales = codes.scales, cache.version = version;
  if (cache.in_file) give_pages_back(codes.data.mutable_data_ptr(), static_cast<int64_t>(codes.data.nbytes()));
  return cache.packed;
}

}  // namespace accelerate::codes
