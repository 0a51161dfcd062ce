#include "codes/kernels/linear.hpp"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/matmul.h>

#include "codes/kernels/exact.hpp"
#include "codes/kernels/frozen.hpp"
#include "codes/kernels/multiply.hpp"
#include "codes/kernels/packed_cache.hpp"
#include "utils/raise.hpp"

namespace accelerate::codes {
namespace {

using Bias = std::optional<at::Tensor>;

bool has(const Bias& bias) { return bias && bias->defined(); }

bool is_known(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16; }

/// Has the codes itself.
struct HeldCodes final : kernels::FrozenWeight {
  explicit HeldCodes(Codes held) : codes(std::move(held)) {}
  at::Tensor with_codes(const at::Device&, c10::function_ref<at::Tensor(const Codes&)> use) const override {
    return use(codes);
  }
  const Codes codes;
};

at::Tensor fast_linear(const at::Tensor& x, const kernels::Packed& packed, const Bias& bias) {
  auto y = kernels::multiply(kernels::instruction_set(), x.to(at::kFloat).contiguous(), packed);
  if (has(bias)) y.add_(*bias);
  return y.to(x.scalar_type());
}

/// Columns of x with a magnitude of `threshold` or more keep their numbers; the others are rounded.
at::Tensor linear_with_outliers(const at::Tensor& x, const Codes& w, const kernels::Packed& packed, const Bias& bias,
                                double threshold) {
  const auto inputs = x.to(at::kFloat);
  const auto columns = inputs.abs().ge(threshold).reshape({-1, packed.columns}).any(0).nonzero().squeeze(1);
  if (columns.numel() == 0) return fast_linear(x, packed, bias);
  const auto part = kernels::columns_of_bytes(packed, columns) * (plain_scales(w) / 127).unsqueeze(1);
  const auto y = kernels::multiply(kernels::instruction_set(), inputs.index_fill(-1, columns, 0).contiguous(), packed) +
                 at::matmul(inputs.index_select(-1, columns), part.t());
  return (has(bias) ? y + *bias : y).to(x.scalar_type());
}

void check_arguments(const at::Tensor& x, const Codes& w, const Bias& bias, const LinearOptions& options) {
  check(w, "codes::linear: the weight");
  if (w.shape.size() != 2)
    raise<ShapeError>("codes::linear: the weight has {} dimensions, expected [N, K].", w.shape.size());
  kernels::check_product(x, w, bias);
  if (has(bias) && bias->device() != w.device())
    raise<ConfigError>("codes::linear: the bias is on {}, expected {}, where the weight is.", bias->device().str(),
                       w.device().str());
  if (x.device() != w.device() || !is_known(x.scalar_type()))
    raise<ConfigError>("codes::linear: x is {} on {}, expected fp32, fp16 or bf16 on {}, where the weight is.",
                       c10::toString(x.scalar_type()), x.device().str(), w.device().str());
  if (options.outlier_threshold != 0 && (w.encoding != Encoding::int8_rowwise || !(options.outlier_threshold > 0)))
    raise<ConfigError>(
        "codes::linear: outlier_threshold is {} for a weight in {}, expected 0, or a positive number with "
        "int8_rowwise. Other encodings round inputs in parts of 32, which an outlier does not leave.",
        options.outlier_threshold, name(w.encoding));
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias,
                  const LinearOptions& options) {
  check_arguments(x, w, bias, options);
  if (kernels::wants_gradient(x, bias))
    return kernels::frozen_linear(x, bias, c10::make_intrusive<HeldCodes>(w),
                                  [&] { return kernels::exact_linear(x, w, bias); });
  const at::NoGradGuard no_grad;
  const auto packed =
      options.exact || !x.is_cpu() || !kernels::has_fast_instructions() ? nullptr : kernels::packed_of(w);
  if (!packed) return kernels::exact_linear(x, w, bias);
  return options.outlier_threshold > 0 ? linear_with_outliers(x, w, *packed, bias, options.outlier_threshold)
                                       : fast_linear(x, *packed, bias);
}

at::Tensor kernels::try_linear(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias) {
  if (!has_fast_instructions() || !x.is_cpu() || !is_known(x.scalar_type()) || w.shape.size() != 2) return {};
  if (!wants_gradient(x, bias) && !packed_of(w)) return {};
  return linear(x, w, bias, {});
}

}  // namespace accelerate::codes
