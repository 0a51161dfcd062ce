#include "models/row_product.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>

#include "utils/parallel.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace accelerate::models::detail {
namespace {

#if defined(__x86_64__)

bool is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

__attribute__((target("avx2,fma"))) float dot(const float* a, const float* b, int64_t count) {
  // Four chains, because each step waits for the one before it in its chain.
  constexpr int64_t kLanes = 8, kChains = 4;
  __m256 sums[kChains] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  int64_t i = 0;
  for (; i + kChains * kLanes <= count; i += kChains * kLanes)
    for (int64_t chain = 0; chain < kChains; ++chain) sums[chain] = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + chain * kLanes), _mm256_loadu_ps(b + i + chain * kLanes), sums[chain]);
  float parts[kLanes];
  _mm256_storeu_ps(parts, _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
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
  constexpr int64_t kGrain = 1 << 15;  // elements that are worth a thread
  auto* const out = result.mutable_data_ptr<float>();
  parallel_ranges(weight.size(0), std::max<int64_t>(1, kGrain / inputs), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) out[row] = dot(rows + row * inputs, in, inputs) + (added ? added[row] : 0);
  });
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
