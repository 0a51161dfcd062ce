#include "codes/kernels/linear.hpp"

#include <algorithm>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include "codes/kernels/multiply.hpp"
#include "codes/kernels/packed_cache.hpp"
#include "utils/raise.hpp"

namespace accelerate::codes {
namespace {

using Bias = std::optional<at::Tensor>;

bool has(const Bias& bias) { return bias && bias->defined(); }

bool is_known(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16; }

bool needs_gradient(const at::Tensor& x, const Bias& bias) {
  return c10::GradMode::is_enabled() && (x.requires_grad() || (has(bias) && bias->requires_grad()));
}

/// Calls work(first row, rows as fp32, fp16 or bf16) for all of a weight, few rows at a time.
template <class Work> void for_decoded(const Codes& w, at::ScalarType dtype, const Work& work) {
  constexpr int64_t kElements = 1 << 21;  // decoded at a time: 8 MB of fp32
  const int64_t rows = w.rows(), step = std::max<int64_t>(16, kElements / std::max<int64_t>(1, w.columns()));
  for (int64_t first = 0; first < rows; first += step)
    work(first, decode_rows(w, first, std::min(step, rows - first), dtype));
}

at::Tensor exact_linear(const at::Tensor& x, const Codes& w, const Bias& bias) {
  std::vector<at::Tensor> columns;
  for_decoded(w, x.scalar_type(), [&](int64_t first, const at::Tensor& rows) {
    columns.push_back(at::linear(x, rows, has(bias) ? Bias(bias->narrow(0, first, rows.size(0))) : Bias()));
  });
  if (columns.empty()) return at::linear(x, decode(w, x.scalar_type()), bias);
  return columns.size() == 1 ? columns.front() : at::cat(columns, -1);
}

struct HeldCodes final : torch::CustomClassHolder {
  explicit HeldCodes(const Codes& held) : codes(held) {}
  Codes codes;
};

/// The gradients of x and of the bias. The weight is frozen, and decoded once more.
struct ExactLinear final : torch::autograd::Function<ExactLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& bias,
                            const Codes& w) {
    context->saved_data["codes"] = c10::IValue::make_capsule(c10::make_intrusive<HeldCodes>(w));
    context->saved_data["sizes"] = x.sizes().vec();
    return exact_linear(x, w, bias);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto held = c10::static_intrusive_pointer_cast<HeldCodes>(context->saved_data["codes"].toCapsule());
    const auto& gradient = gradients[0];
    torch::autograd::variable_list result(3);
    if (context->needs_input_grad(0)) {
      result[0] = at::zeros(context->saved_data["sizes"].toIntVector(), gradient.options());
      for_decoded(held->codes, gradient.scalar_type(), [&](int64_t first, const at::Tensor& rows) {
        result[0] = result[0] + at::matmul(gradient.narrow(-1, first, rows.size(0)), rows);
      });
    }
    if (context->needs_input_grad(1)) result[1] = gradient.reshape({-1, gradient.size(-1)}).sum(0);
    return result;
  }
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
  if (x.dim() == 0 || x.size(-1) != w.columns())
    raise<ShapeError>("codes::linear: x has the shape {}, and the weight [{}, {}]; expected [.., {}].", x.sizes(),
                      w.rows(), w.columns(), w.columns());
  if (has(bias) && (bias->dim() != 1 || bias->size(0) != w.rows()))
    raise<ShapeError>("codes::linear: the bias has the shape {}, expected [{}].", bias->sizes(), w.rows());
  if (x.device() != w.device() || !is_known(x.scalar_type()))
    raise<ConfigError>("codes::linear: x is {} on {}, expected fp32, fp16 or bf16 on {}, where the weight is.",
                       c10::toString(x.scalar_type()), x.device().str(), w.device().str());
  if (options.outlier_threshold != 0 && (w.encoding != Encoding::int8_rowwise || !(options.outlier_threshold > 0)))
    raise<ConfigError>(
        "codes::linear: outlier_threshold is {} for a weight in {}, expected 0, or a positive number with "
        "int8_rowwise. "
        "Other encodings round inputs in parts of 32, which an outlier does not leave.",
        options.outlier_threshold, name(w.encoding));
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias,
                  const LinearOptions& options) {
  check_arguments(x, w, bias, options);
  if (needs_gradient(x, bias)) return ExactLinear::apply(x, has(bias) ? *bias : at::Tensor(), w);
  const at::NoGradGuard no_grad;
  const auto packed = options.exact || !x.is_cpu() ? nullptr : kernels::packed_of(w);
  if (!packed) return exact_linear(x, w, bias);
  return options.outlier_threshold > 0 ? linear_with_outliers(x, w, *packed, bias, options.outlier_threshold)
                                       : fast_linear(x, *packed, bias);
}

at::Tensor kernels::try_linear(const at::Tensor& x, const Codes& w, const std::optional<at::Tensor>& bias) {
  if (!has_fast_instructions() || !x.is_cpu() || !is_known(x.scalar_type()) || w.shape.size() != 2) return {};
  if (!needs_gradient(x, bias) && !packed_of(w)) return {};
  return linear(x, w, bias, {});
}

}  // namespace accelerate::codes
