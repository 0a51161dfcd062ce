#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "accelerate/codes/kernels.hpp"
#include "codes/blockwise.hpp"
#include "codes/cuda/codes_on_gpu.hpp"
#include "codes/decode_by_operators.hpp"
#include "codes/decoder.hpp"
#include "codes/kernels/packed_cache.hpp"
#include "memory/huge_pages.hpp"
#include "utils/parallel.hpp"
#include "utils/raise.hpp"

namespace accelerate::codes {
namespace {

/// Elements [first, first + to.numel()) of the flattened tensor. A range that begins in the middle of a unit is decoded
/// from the unit's begin.
void decode_slice(const Decoder& decoder, int64_t first, const at::Tensor& to) {
  const int64_t count = to.numel(), unit = decoder.unit(), lead = first % unit;
  constexpr int64_t kPart = 1 << 13;  // elements: 32 KiB of fp32 stay near
  const bool direct = to.scalar_type() == at::kFloat && lead == 0 && (count % unit == 0 || unit <= 2);
  const at::Tensor flat = to.view({-1});
  parallel_ranges((lead + count + kPart - 1) / kPart, 4, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below;  // LibTorch's threads know nothing of inference mode
    const at::Tensor part = direct ? at::Tensor() : at::empty({kPart}, at::TensorOptions().dtype(at::kFloat));
    for (const int64_t i : c10::irange(begin, end)) {
      const int64_t from = i * kPart, until = std::min(from + kPart, lead + count);  // counted from first - lead
      if (direct) {
        decoder(first + from, first + until, flat.mutable_data_ptr<float>() + from);
        continue;
      }
      const int64_t end_of_unit = unit <= 2 ? until : (until + unit - 1) / unit * unit;
      decoder(first - lead + from, first - lead + end_of_unit, part.mutable_data_ptr<float>());
      const int64_t skip = i == 0 ? lead : 0;
      flat.narrow(0, from + skip - lead, until - from - skip).copy_(part.narrow(0, skip, until - from - skip));
    }
  });
}

at::Tensor fresh(at::IntArrayRef sizes, const Codes& codes, std::optional<at::ScalarType> dtype) {
  return at::empty(sizes, at::TensorOptions().dtype(dtype.value_or(codes.dtype)).device(codes.device()));
}

/// decode_rows() without looking at its arguments.
at::Tensor rows_of(const Codes& codes, int64_t first, int64_t count, at::ScalarType dtype) {
  at::Tensor values = fresh({count, codes.columns()}, codes, dtype);
  if (!codes.device().is_cpu())
    return cuda::decode_rows(codes, first, values) ? values : decode_by_operators(codes, first, count, dtype);
  const auto rows = kernels::rows_of(codes, first, count);
  decode_slice(Decoder(rows.codes), rows.first * codes.columns(), values);
  return values;
}

/// On another device than the CPU: writes all rows; operators few at a time, since they take memory meanwhile.
void decode_there(const Codes& codes, const at::Tensor& values) {
  if (cuda::decode_rows(codes, 0, values)) return;
  constexpr int64_t kElements = 1 << 22;
  const int64_t rows = codes.rows(), step = std::max<int64_t>(1, kElements / std::max<int64_t>(1, codes.columns()));
  const at::Tensor matrix = values.view({rows, codes.columns()});
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t count = std::min(step, rows - first);
    matrix.narrow(0, first, count).copy_(decode_by_operators(codes, first, count, values.scalar_type()));
  }
}

void write_all(const Codes& codes, const at::Tensor& values) {
  if (codes.device().is_cpu()) decode_slice(Decoder(unpacked(codes)), 0, values);
  else if (values.numel() > 0) decode_there(codes, values);
}

void expect_dtype(at::ScalarType dtype) {
  if (dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16)
    raise<ConfigError>("decode: found {} to decode to, expected fp32, fp16 or bf16", c10::toString(dtype));
}

}  // namespace

at::Tensor plain_scales(const Codes& codes) {
  if (is_gguf(codes.encoding))
    raise<ShapeError>("codes: {} has its scales within its blocks, not beside them", name(codes.encoding));
  if (!codes.nested) return codes.scales.is_meta() ? unpacked(codes).scales : codes.scales;
  if (!codes.device().is_cpu()) return scales_by_operators(codes);
  const at::Tensor scales =
      decode_blockwise({.codes = codes.scales, .absmax = codes.nested->absmax}, Map::dynamic, codes.nested->block_size,
                       empty_in_huge_pages(codes.scales.sizes(), at::kFloat));  // not between what stays
  auto* values = scales.mutable_data_ptr<float>();
  for (int64_t i = 0; i < scales.numel(); ++i) values[i] += codes.nested->offset;
  return scales;
}

at::Tensor decode(const Codes& codes, std::optional<at::ScalarType> dtype) {
  expect_dtype(dtype.value_or(codes.dtype));
  check(codes, "decode");
  at::Tensor values = fresh(codes.shape, codes, dtype);
  write_all(codes, values);
  return values;
}

at::Tensor decode_rows(const Codes& codes, int64_t first, int64_t count, std::optional<at::ScalarType> dtype) {
  expect_dtype(dtype.value_or(codes.dtype));
  check(codes, "decode_rows");
  if (first < 0 || count < 0 || first > codes.rows() - count)
    raise<ShapeError>("decode_rows: found rows {} to {}, expected rows of the {} that there are", first, first + count,
                      codes.rows());
  return rows_of(codes, first, count, dtype.value_or(codes.dtype));
}

at::Tensor embedding(const at::Tensor& indices, const Codes& w, std::optional<at::ScalarType> dtype) {
  expect_dtype(dtype.value_or(w.dtype));
  check(w, "codes::embedding: the table");
  if (w.shape.size() != 2)
    raise<ShapeError>("codes::embedding: the table has {} dimensions, expected [N, K].", w.shape.size());
  if (indices.device() != w.device() || (indices.scalar_type() != at::kLong && indices.scalar_type() != at::kInt))
    raise<ConfigError>("codes::embedding: indices are {} on {}, expected int64 or int32 on {}.",
                       c10::toString(indices.scalar_type()), indices.device().str(), w.device().str());
  const at::Tensor wanted = indices.reshape({-1}).to(at::kCPU, at::kLong).contiguous();
  const auto* row = wanted.const_data_ptr<int64_t>();
  std::vector<int64_t> sizes = indices.sizes().vec();
  sizes.push_back(w.columns());
  at::Tensor values = fresh(sizes, w, dtype);
  const at::Tensor rows = values.view({wanted.numel(), w.columns()});
  for (const int64_t i : c10::irange(wanted.numel()))
    if (row[i] < 0 || row[i] >= w.rows())
      raise<ShapeError>("codes::embedding: index {} of a table of {} rows.", row[i], w.rows());
  if (!w.device().is_cpu()) {
    const at::Tensor flat = indices.reshape({-1});
    if (!cuda::decode_rows(w, flat, rows)) rows.copy_(rows_by_operators(w, flat));
    return values;
  }
  const auto whole = kernels::plain_of(w);
  const std::optional<Decoder> decoder = whole ? std::optional<Decoder>(*whole) : std::nullopt;
  for (const int64_t i : c10::irange(wanted.numel())) {
    if (decoder) {
      decode_slice(*decoder, row[i] * w.columns(), rows.select(0, i));
    } else {  // in the order of products: each row is put back for itself
      const auto found = kernels::rows_of(w, row[i], 1);
      decode_slice(Decoder(found.codes), found.first * w.columns(), rows.select(0, i));
    }
  }
  return values;
}

void decode_into(const Codes& codes, const at::Tensor& values) {
  expect_dtype(values.scalar_type());
  check(codes, "decode_into");
  if (values.numel() != codes.numel() || !values.is_contiguous() || values.device() != codes.device())
    raise<ShapeError>("decode_into: found {} elements{} on {}, expected {}, contiguous, on {}", values.numel(),
                      values.is_contiguous() ? "" : " with gaps", values.device().str(), codes.numel(),
                      codes.device().str());
  write_all(codes, values);
}

}  // namespace accelerate::codes
