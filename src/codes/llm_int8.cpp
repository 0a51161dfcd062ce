#include "codes/llm_int8.hpp"

#include <ATen/ops/_int_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

#include "accelerate/codes/kernels.hpp"
#include "codes/kernels/exact.hpp"
#include "codes/kernels/multiply.hpp"
#include "codes/kernels/packed_cache.hpp"

namespace accelerate::codes {
namespace {

/// int8 [m, k] and [n, k] give a b^T, int32 [m, n]. On GPUs LibTorch wants more than 16 rows, and other sizes that are
/// multiples of 8.
at::Tensor int8_product(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_cpu()) return at::_int_mm(a, b.t());
  const auto padded = [](const at::Tensor& matrix, int64_t rows) {
    const int64_t more = rows - matrix.size(0), columns = (8 - matrix.size(1) % 8) % 8;
    return more > 0 || columns > 0 ? at::constant_pad_nd(matrix, {0, columns, 0, more}) : matrix;
  };
  const int64_t n = (b.size(0) + 7) / 8 * 8;
  return at::_int_mm(padded(a, std::max<int64_t>(a.size(0), 17)), padded(b, n).t())
      .narrow(0, 0, a.size(0))
      .narrow(1, 0, b.size(0));
}

}  // namespace

at::Tensor llm_int8_linear(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias,
                           double threshold) {
  kernels::check_product(x, w, bias);
  const int64_t n = w.shape[0], k = w.shape[1];
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = n;
  if (x.numel() == 0) {
    const at::Tensor nothing = at::zeros(sizes, x.options());
    return bias && bias->defined() ? nothing + bias->to(x.scalar_type()) : nothing;
  }
  const at::Tensor rows = x.reshape({-1, k}).contiguous();
  at::Tensor half = rows.to(at::kHalf, /*non_blocking=*/false, /*copy=*/true), columns;
  if (threshold > 0) {
    const at::Tensor outliers = half.abs().ge(threshold);
    columns = outliers.any(0).nonzero().view({-1});
    if (columns.numel() > 0) half.masked_fill_(outliers, 0);
  }
  const at::Tensor scales = at::amax(half.abs(), {1}).to(at::kFloat);
  const at::Tensor inverse = (scales.reciprocal() * 127).masked_fill_(scales == 0, 0);
  at::Tensor codes = (half * inverse.unsqueeze(1)).round().to(at::kChar);
  if (columns.defined() && columns.numel() > 0 && rows.size(0) > 1) codes.index_fill_(1, columns, 0);
  constexpr double kInverseSquare = 6.200124e-05;  // 1 / 127^2, as bitsandbytes writes it
  constexpr int64_t kMostColumns = 1 << 16;        // whose products fit 32 bits, with codes from 0 to 255
  const auto packed =
      x.is_cpu() && k <= kMostColumns && kernels::has_fast_instructions() ? kernels::packed_of(w) : nullptr;
  const at::Tensor data = packed ? at::Tensor() : unpacked(w).data.to(x.device());
  at::Tensor y =
      (packed ? kernels::multiply_whole(kernels::instruction_set(), codes, *packed) : int8_product(codes, data)) *
      (scales.unsqueeze(1) * w.scales.to(x.device()).unsqueeze(0)) * kInverseSquare;
  if (bias && bias->defined()) y += *bias;
  y = y.to(x.scalar_type());
  if (columns.defined() && columns.numel() > 0) {
    constexpr double kInverse = 7.874015718698502e-3;  // 1 / 127
    const at::Tensor chosen = packed ? kernels::columns_of_bytes(*packed, columns) : data.index_select(1, columns);
    const at::Tensor weight = chosen * w.scales.to(x.device()).unsqueeze(1);
    y = at::addmm(y, rows.index_select(1, columns), (weight * kInverse).to(x.scalar_type()).t());
  }
  return y.view(sizes);
}

}  // namespace accelerate::codes
