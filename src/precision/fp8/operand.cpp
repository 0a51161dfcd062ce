#include "precision/fp8/operand.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <atomic>

#include "codes/float8.hpp"

namespace accelerate::fp8 {
namespace {

/// Encodes a matrix that lies transposed in memory, as it lies there.
codes::Float8Result encode_as_it_lies(const at::Tensor& matrix, const at::Tensor& scale, codes::Float8 format,
                                      const codes::Float8Request& request) {
  if (matrix.is_contiguous() || !matrix.t().is_contiguous()) return encode_once(matrix, scale, format, request);
  codes::Float8Result result = encode_once(matrix.t(), scale, format, request);
  if (result.codes.defined()) result.codes = result.codes.t();
  if (result.values.defined()) result.values = result.values.t();
  return result;
}

at::Tensor values_of(const Operand& operand) {
  if (operand.values.defined()) return operand.values;
  if (operand.exponents.defined()) return codes::decode_mx({operand.codes, operand.exponents}, at::kFloat);
  return codes::decode(operand.codes, {}, at::kFloat);
}

/// Whether this GPU multiplies numbers in 8 bits (from sm_89 on): it is asked once, with a product.
bool gpu_multiplies(const at::Device& device) {
  constexpr int kAsked = 1, kCan = 2;
  static std::array<std::atomic<int>, 64> known{};
  const auto index = static_cast<size_t>(device.index()) % known.size();
  if (const int state = known[index].load(); state != 0) return state == kCan;
  bool can = false;
  try {
    const auto options = at::TensorOptions().device(device);
    const at::Tensor a = at::zeros({16, 16}, options.dtype(at::kByte)).view(at::kFloat8_e4m3fn);
    const at::Tensor one = at::ones({}, options.dtype(at::kFloat));
    at::_scaled_mm(a, a.t(), one, one, {}, {}, at::kBFloat16);
    can = true;
  } catch (const c10::Error&) {  // what it can't do it says so
  }
  known[index].store(can ? kCan : kAsked);
  return can;
}

at::Tensor padded(const at::Tensor& codes) {
  const int64_t missing = (16 - codes.size(1) % 16) % 16;
  const at::Tensor rows = codes.contiguous();
  if (missing == 0) return rows;
  return at::constant_pad_nd(rows.view(at::kByte), {0, missing}).view(codes.scalar_type());
}

}  // namespace

Operand Operand::turned() const {
  return {codes.defined() ? codes.t() : codes,
          values.defined() ? values.t() : values,
          inverse,
          exponents,
          high.defined() ? high.t() : high,
          amax};
}

Operand make_operand(const at::Tensor& matrix, const Cast& cast, const at::Tensor& scale, bool values) {
  Operand operand;
  switch (cast.scaling) {
    case Scaling::none:
      operand.high = matrix;
      return operand;
    case Scaling::delayed:
    case Scaling::tensor: {
      const bool delayed = cast.scaling == Scaling::delayed;
      const at::Tensor used = delayed ? scale : codes::scale_of(codes::amax(matrix), cast.format, cast.power_of_two);
      const auto result = encode_as_it_lies(matrix, used, cast.format, {.values = values, .amax = delayed});
      operand.codes = result.codes;
      operand.values = result.values;
      operand.amax = result.amax;
      operand.inverse = used.reciprocal();
      return operand;
    }
    case Scaling::row: {
      const at::Tensor used = codes::scale_of(codes::amax(matrix, 1), cast.format, cast.power_of_two);
      operand.codes = codes::encode(matrix, used, cast.format);
      operand.inverse = used.reciprocal();
      return operand;
    }
    case Scaling::block: {
      auto result = codes::encode_mx(matrix, cast.format);
      operand.codes = std::move(result.codes);
      operand.exponents = std::move(result.exponents);
      return operand;
    }
  }
  return operand;
}

at::Tensor multiply_emulated(const Operand& a, const Operand& b, at::ScalarType dtype) {
  at::Tensor product = at::mm(values_of(a), values_of(b).t());
  if (a.inverse.defined() && b.inverse.defined() && a.inverse.numel() == 1 && b.inverse.numel() == 1)
    return product.mul_(a.inverse * b.inverse).to(dtype);
  if (a.inverse.defined()) product.mul_(a.inverse);
  if (b.inverse.defined()) product.mul_(b.inverse.t());
  return product.to(dtype);
}

at::Tensor multiply_scaled(const Operand& a, const Operand& b, at::ScalarType dtype) {
  // Zeros add nothing to sums.
  const at::Tensor rows = padded(a.codes), columns = padded(b.codes).t();
  const bool by_row = a.inverse.numel() != 1 || b.inverse.numel() != 1;
  const auto spread = [&](const at::Tensor& inverse, int64_t count) {
    return inverse.numel() == 1 && by_row ? inverse.reshape({1, 1}).expand({count, 1}).contiguous()
                                          : inverse.contiguous();
  };
  const at::Tensor scale_a = spread(a.inverse, a.codes.size(0));
  const at::Tensor scale_b = by_row ? spread(b.inverse, b.codes.size(0)).t() : b.inverse;
  // With scales per row cuBLAS and CUTLASS write bf16 only.
  const at::ScalarType written = by_row ? at::kBFloat16 : dtype;
  return at::_scaled_mm(rows, columns, scale_a, scale_b, {}, {}, written).to(dtype);
}

at::Tensor multiply(const Operand& a, const Operand& b, at::ScalarType dtype) {
  if (a.is_high()) return at::mm(a.high, b.high.to(a.high.scalar_type()).t()).to(dtype);
  // No GPU has that.
  const bool both_e5m2 = a.codes.scalar_type() == at::kFloat8_e5m2 && b.codes.scalar_type() == at::kFloat8_e5m2;
  if (a.codes.is_cuda() && !both_e5m2 && !a.exponents.defined() && gpu_multiplies(a.codes.device()))
    return multiply_scaled(a, b, dtype);
  return multiply_emulated(a, b, dtype);
}

at::Tensor rounded_to(const at::Tensor& x, codes::Float8 format) {
  const at::Tensor scale = codes::scale_of(codes::amax(x), format);
  return codes::decode(codes::encode(x, scale, format), scale, x.scalar_type());
}

}  // namespace accelerate::fp8
