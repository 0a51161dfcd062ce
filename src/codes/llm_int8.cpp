#include "codes/llm_int8.hpp"

#include <ATen/ops/_int_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/amax.h>

#include <vector>

namespace accelerate::codes {

at::Tensor llm_int8_linear(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias,
                           double threshold) {
  const int64_t n = w.shape[0], k = w.shape[1];
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = n;
  if (x.numel() == 0) return at::empty(sizes, x.options());
  const at::Tensor rows = x.reshape({-1, k});
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
  at::Tensor y = at::_int_mm(codes, w.data.to(x.device()).t()) *
                 (scales.unsqueeze(1) * w.scales.to(x.device()).unsqueeze(0)) * kInverseSquare;
  if (bias && bias->defined()) y += *bias;
  y = y.to(x.scalar_type());
  if (columns.defined() && columns.numel() > 0) {
    constexpr double kInverse = 7.874015718698502e-3;  // 1 / 127
    const at::Tensor weight = w.data.to(x.device()).index_select(1, columns) * w.scales.to(x.device()).unsqueeze(1);
    y = at::addmm(y, rows.index_select(1, columns), (weight * kInverse).to(x.scalar_type()).t());
  }
  return y.view(sizes);
}

}  // namespace accelerate::codes
