#include "models/row_product.hpp"

#include <ATen/TensorIterator.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace accelerate::models::detail {
namespace {

#if defined(__x86_64__)

bool is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

__attribute__((target("avx2,fma"))) float dot(const float* a, const float* b, int64_t count) {
  auto even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    even = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), even);
    odd = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 8), _mm256_loadu_ps(b + i + 8), odd);
  }
  float parts[8];
  _mm256_storeu_ps(parts, _mm256_add_ps(even, odd));
  float sum = ((parts[0] + parts[4]) + (parts[1] + parts[5])) + ((parts[2] + parts[6]) + (parts[3] + parts[7]));
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

#else

bool is_supported() { return false; }
float dot(const float*, const float*, int64_t) { return 0; }  // never called

#endif

/// The kernel. x has one row; all are contiguous fp32.
at::Tensor row_product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  at::Tensor result = at::empty(sizes, x.options());
  const int64_t inputs = weight.size(1);
  const auto* const in = x.const_data_ptr<float>();
  const auto* const rows = weight.const_data_ptr<float>();
  const auto* const added = bias && bias->defined() ? bias->const_data_ptr<float>() : nullptr;
  const auto* const begin = result.const_data_ptr<float>();
  // TensorIterator's loop runs on LibTorch's own threads; at::parallel_for in a file of ours would need its OpenMP.
  at::TensorIterator::nullary_op(result).for_each(
      [&](char** data, const int64_t* strides, int64_t count, int64_t times) {
        for (int64_t i = 0; i < times; ++i) {
          auto* out = reinterpret_cast<float*>(data[0] + i * strides[1]);
          for (int64_t row = out - begin, end = row + count; row < end; ++row, ++out) *out = dot(rows + row * inputs, in, inputs) + (added ? added[row] : 0);
        }
      },
      std::max<int64_t>(1, at::internal::GRAIN_SIZE / inputs));
  return result;
}

/// Registered when it is first needed: a static library's object file that nobody calls is not linked.
const auto& operation() {
  static const torch::Library definition = [] {
    torch::Library library(torch::Library::DEF, "accelerate_models", std::nullopt, __FILE__, __LINE__);
    library.def("row_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    library.impl("row_product", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(row_product)));
    return library;
  }();
  static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow("accelerate_models::row_product", "").typed<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&)>();
  return handle;
}

bool fits(const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat && tensor.is_cpu() && tensor.is_contiguous(); }

}  // namespace

at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  static const bool supported = is_supported();
  const auto optional_bias = bias.defined() ? std::optional(bias) : std::nullopt;
  const bool one_row = supported && weight.dim() == 2 && x.dim() > 0 && x.numel() == weight.size(1) && x.size(-1) == weight.size(1);
  if (!one_row || !fits(x) || !fits(weight) || (bias.defined() && !fits(bias)) || at::autocast::is_autocast_enabled(at::kCPU) ||
      (c10::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad())))
    return at::linear(x, weight, optional_bias);
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return operation().call(x, weight, optional_bias);
}

}  // namespace accelerate::models::detail
