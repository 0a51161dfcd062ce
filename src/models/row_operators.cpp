#include "models/row_operators.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "models/row_loops.hpp"
#include "utils/parallel.hpp"

namespace accelerate::models::detail {
namespace {

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
    for (int64_t row = begin; row < end; ++row)
      out[row] = dot(rows + row * inputs, in, inputs) + (added ? added[row] : 0);
  });
  return result;
}

/// The kernel. x has one row; both are contiguous fp32.
at::Tensor row_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  at::Tensor result = at::empty(x.sizes(), x.options());
  const int64_t count = weight.numel();
  const auto *const in = x.const_data_ptr<float>(), *const factors = weight.const_data_ptr<float>();
  auto* const out = result.mutable_data_ptr<float>();
  const auto scale =
      static_cast<float>(1.0 / std::sqrt(static_cast<double>(dot(in, in, count)) / static_cast<double>(count) + eps));
  for (int64_t i = 0; i < count; ++i) out[i] = in[i] * scale * factors[i];
  return result;
}

/// Registered when they are first needed: a static library's object file that nobody calls is not linked.
void define_operators() {
  static const torch::Library definitions = [] {
    torch::Library library(torch::Library::DEF, "accelerate_models", std::nullopt, __FILE__, __LINE__);
    library.def("row_product(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    library.def("row_norm(Tensor x, Tensor weight, float eps) -> Tensor");
    library.impl("row_product", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(row_product)));
    library.impl("row_norm", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(row_norm)));
    return library;
  }();
}

template <class Signature> c10::TypedOperatorHandle<Signature> operation(const char* name) {
  define_operators();
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

bool is_plain(const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat && tensor.is_cpu(); }
bool fits(const at::Tensor& tensor) { return is_plain(tensor) && tensor.is_contiguous(); }

/// Whether nobody but us wants to know of these operators' work.
bool computes_only(std::initializer_list<const at::Tensor*> tensors) {
  static const bool supported = is_supported();
  return supported && !at::autocast::is_autocast_enabled(at::kCPU) &&
         (!c10::GradMode::is_enabled() || std::none_of(tensors.begin(), tensors.end(), [](const at::Tensor* tensor) {
           return tensor->requires_grad();
         }));
}

}  // namespace

at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto optional_bias = bias.defined() ? std::optional(bias) : std::nullopt;
  const bool one_row = weight.dim() == 2 && x.dim() > 0 && x.numel() == weight.size(1) && x.size(-1) == weight.size(1);
  if (!one_row || !fits(x) || !fits(weight) || (bias.defined() && !fits(bias)) || !computes_only({&x, &weight}))
    return at::linear(x, weight, optional_bias);
  static const auto handle = operation<decltype(row_product)>("accelerate_models::row_product");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return handle.call(x, weight, optional_bias);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  if (x.numel() != weight.numel() || x.dim() == 0 || x.size(-1) != weight.numel() || !fits(x) || !fits(weight) ||
      !computes_only({&x, &weight}))
    return at::rms_norm(x, weight.sizes(), weight, eps);
  static const auto handle = operation<decltype(row_norm)>("accelerate_models::row_norm");
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  return handle.call(x, weight, eps);
}

at::Tensor attend_with_one_token(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 double scale) {
  const auto in_rows = [](const at::Tensor& tensor) { return is_plain(tensor) && tensor.stride(-1) == 1; };
  if (!in_rows(query) || !in_rows(key) || !in_rows(value) || !computes_only({&query, &key, &value})) return {};
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const int64_t batch = query.size(0), heads = query.size(1), shared = heads / key.size(1), keys = key.size(2),
                size = query.size(3), value_size = value.size(3);
  const auto for_each_head = [&](const auto& work) {
    constexpr int64_t kGrain = 1 << 15;  // products that are worth a thread
    parallel_ranges(batch * heads, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, keys * size)),
                    [&](int64_t begin, int64_t end) {
                      for (int64_t i = begin; i < end; ++i) work(i, i / heads, i % heads);
                    });
  };
  const auto rows_of = [&](const at::Tensor& tensor, int64_t row, int64_t head) {
    return tensor.const_data_ptr<float>() + row * tensor.stride(0) + head * tensor.stride(1);
  };
  at::Tensor scores = at::empty({batch * heads, keys}, query.options());
  auto* const to_scores = scores.mutable_data_ptr<float>();
  for_each_head([&](int64_t i, int64_t row, int64_t head) {
    const float *const of_query = rows_of(query, row, head), *const of_keys = rows_of(key, row, head / shared);
    for (int64_t k = 0; k < keys; ++k)
      to_scores[i * keys + k] = static_cast<float>(scale) * dot(of_query, of_keys + k * key.stride(2), size);
  });
  scores = at::softmax(scores, -1);
  at::Tensor result = at::zeros({batch, 1, heads * value_size}, query.options());
  const auto* const shares = scores.const_data_ptr<float>();
  auto* const out = result.mutable_data_ptr<float>();
  for_each_head([&](int64_t i, int64_t row, int64_t head) {
    const float* const of_values = rows_of(value, row, head / shared);
    for (int64_t k = 0; k < keys; ++k)
      add_scaled(out + i * value_size, of_values + k * value.stride(2), shares[i * keys + k], value_size);
  });
  return result;
}

}  // namespace accelerate::models::detail
