#include "codes/float8.hpp"

#include <ATen/Version.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/floor.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/log2.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <bit>
#include <string>

#include "codes/kernels/float8.hpp"
#include "codes/kernels/product.hpp"
#include "utils/parallel.hpp"
#include "utils/raise.hpp"

namespace accelerate::codes {
namespace {

const kernels::Float8Loops& loops() {
  static const kernels::Float8Loops& chosen = []() -> const kernels::Float8Loops& {
    const std::string allowed = at::get_cpu_capability();
    // These are compiled for the same instructions for which the products' instruction sets ask the processor.
    const bool has_avx512 = kernels::avx512_instructions() && kernels::avx512_float8();
    const bool has_avx2 = kernels::avx2_instructions() && kernels::avx2_float8();
    if (allowed == "AVX512" && has_avx512) return *kernels::avx512_float8();
    if ((allowed == "AVX512" || allowed.starts_with("AVX2")) && has_avx2) return *kernels::avx2_float8();
    return kernels::plain_float8();
  }();
  return chosen;
}

constexpr int64_t kFloat8Grain = 1 << 15;

void require_floating(const char* operation, const at::Tensor& x) {
  if (!at::isFloatingType(x.scalar_type()) || at::isFloat8Type(x.scalar_type()))
    raise<ShapeError>("{}: found a tensor of {}, expected fp32, bf16, fp16 or fp64", operation,
                      c10::toString(x.scalar_type()));
}

void keep_largest(std::atomic<uint32_t>& largest, uint32_t bits) {
  uint32_t seen = largest.load(std::memory_order_relaxed);
  while (bits > seen && !largest.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
  }
}

at::Tensor from_bits(uint32_t bits) { return at::scalar_tensor(std::bit_cast<float>(bits), at::kFloat); }

at::Tensor floats(const at::Tensor& x) { return x.detach().to(at::kFloat).contiguous(); }

uint8_t* bytes_of(const at::Tensor& codes) { return static_cast<uint8_t*>(codes.mutable_data_ptr()); }

}  // namespace

at::ScalarType scalar_type(Float8 format) { return format == Float8::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2; }

float largest(Float8 format) { return format == Float8::e4m3 ? 448.0f : 57344.0f; }

at::Tensor amax(const at::Tensor& x) {
  require_floating("amax", x);
  const at::NoGradGuard no_grad;
  if (x.numel() == 0) return at::zeros({}, x.options().dtype(at::kFloat));
  if (!x.is_cpu()) return x.detach().abs().amax().to(at::kFloat);
  const at::Tensor from = floats(x);
  const auto* data = from.const_data_ptr<float>();
  std::atomic<uint32_t> bits{0};
  parallel_ranges(from.numel(), kFloat8Grain,
                  [&](int64_t begin, int64_t end) { keep_largest(bits, loops().amax(data + begin, end - begin)); });
  return from_bits(bits);
}

at::Tensor amax(const at::Tensor& x, int64_t dim) {
  require_floating("amax", x);
  const at::NoGradGuard no_grad;
  return x.detach().abs().amax(dim, /*keepdim=*/true).to(at::kFloat);
}

at::Tensor scale_of(const at::Tensor& amax, Float8 format, bool power_of_two) {
  const at::NoGradGuard no_grad;
  // In fp64, as torchao: the quotient is rounded once.
  const at::Tensor present = amax.to(at::kDouble).clamp_min(1e-12);
  const at::Tensor rounded = at::full_like(present, largest(format)).div_(present).to(at::kFloat);
  return power_of_two ? rounded.log2().floor_().exp2_() : rounded;
}

Float8Result encode_once(const at::Tensor& x, const at::Tensor& scale, Float8 format, Float8Request request) {
  require_floating("encode", x);
  const at::NoGradGuard no_grad;
  Float8Result result;
  if (!x.is_cpu()) {
    if (request.amax) result.amax = codes::amax(x);
    // Saturation is said here: LibTorch's conversion before 2.12 has none.
    const double limit = largest(format);
    const at::Tensor codes =
        x.detach().to(at::kFloat).mul(scale).clamp_(-limit, limit).contiguous().to(scalar_type(format));
    if (request.values) result.values = codes.to(at::kFloat);
    if (request.codes) result.codes = codes;
    return result;
  }
  const at::Tensor from = floats(x);
  const auto factor = scale.item<float>();
  if (request.codes) result.codes = at::empty(x.sizes(), x.options().dtype(scalar_type(format)));
  if (request.values) result.values = at::empty(x.sizes(), x.options().dtype(at::kFloat));
  uint8_t* codes = request.codes ? bytes_of(result.codes) : nullptr;
  float* values = request.values ? result.values.mutable_data_ptr<float>() : nullptr;
  const auto* data = from.const_data_ptr<float>();
  std::atomic<uint32_t> bits{0};
  parallel_ranges(from.numel(), kFloat8Grain, [&](int64_t begin, int64_t end) {
    keep_largest(bits, loops().encode[static_cast<size_t>(format)](data + begin, end - begin, factor,
                                                                   codes ? codes + begin : nullptr,
                                                                   values ? values + begin : nullptr));
  });
  if (request.amax) result.amax = from_bits(bits);
  return result;
}

at::Tensor encode(const at::Tensor& x, const at::Tensor& scale, Float8 format) {
  if (scale.numel() == 1) return encode_once(x, scale, format, {}).codes;
  const at::NoGradGuard no_grad;
  require_floating("encode", x);
  const at::Tensor scaled = x.detach().to(at::kFloat).mul(scale);
  if (!scaled.sizes().equals(x.sizes()))
    raise<ShapeError>(
        "encode: scales of shape [{}] don't fit a tensor of shape [{}]; expected 1, or the tensor's size, "
        "in each dimension",
        fmt::join(scale.sizes(), ", "), fmt::join(x.sizes(), ", "));
  return encode_once(scaled, at::scalar_tensor(1.0, scaled.options()), format, {}).codes;
}

at::Tensor decode(const at::Tensor& codes, const at::Tensor& scale, at::ScalarType dtype) {
  if (codes.scalar_type() != at::kFloat8_e4m3fn && codes.scalar_type() != at::kFloat8_e5m2)
    raise<ShapeError>("decode: found codes of {}, expected Float8_e4m3fn or Float8_e5m2",
                      c10::toString(codes.scalar_type()));
  const at::NoGradGuard no_grad;
  if (!codes.is_cpu()) {
    const at::Tensor values = codes.to(at::kFloat);
    return (scale.defined() ? values.mul_(scale.reciprocal()) : values).to(dtype);
  }
  // Rows of a transposed view are columns; the result keeps that order.
  const bool turned = codes.dim() == 2 && !codes.is_contiguous() && codes.t().is_contiguous();
  const at::Tensor from = turned ? codes.t() : codes.contiguous();
  at::Tensor values = at::empty(from.sizes(), from.options().dtype(at::kFloat));
  const bool one = scale.defined() && scale.numel() == 1;
  const float factor = one ? scale.reciprocal().item<float>() : 1.0f;
  const auto* data = static_cast<const uint8_t*>(from.const_data_ptr());
  auto* to = values.mutable_data_ptr<float>();
  const auto format = static_cast<size_t>(codes.scalar_type() == at::kFloat8_e4m3fn ? Float8::e4m3 : Float8::e5m2);
  parallel_ranges(from.numel(), kFloat8Grain, [&](int64_t begin, int64_t end) {
    loops().decode[format](data + begin, end - begin, factor, to + begin);
  });
  if (turned) values = values.t();
  if (scale.defined() && !one) values.mul_(scale.reciprocal());
  return values.to(dtype);
}

}  // namespace accelerate::codes
