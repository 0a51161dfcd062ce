#include "profiler/operator_flops.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <string_view>

namespace accelerate::profiler {
namespace {

using Inputs = c10::ArrayRef<const c10::IValue>;
using Rule = std::function<BegunCost(Inputs)>;

/// Undefined where there is none.
at::Tensor tensor_at(Inputs inputs, size_t index) {
  return index < inputs.size() && inputs[index].isTensor() ? inputs[index].toTensor() : at::Tensor();
}
bool is_there(Inputs inputs, size_t index) { return tensor_at(inputs, index).defined(); }
bool is_true(Inputs inputs, size_t index) {
  return index < inputs.size() && inputs[index].isBool() && inputs[index].toBool();
}
int64_t elements(Inputs inputs, size_t index = 0) {
  const at::Tensor tensor = tensor_at(inputs, index);
  return tensor.defined() ? tensor.numel() : 0;
}
/// Without the last dimension.
int64_t rows_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.dim() > 0 && tensor.size(-1) > 0 ? tensor.numel() / tensor.size(-1) : 0;
}
OperatorCost of_macs(int64_t macs, int64_t additions = 0) { return {.flops = 2 * macs + additions, .macs = macs}; }

Rule per_result(int64_t times) {
  return [times](Inputs) { return BegunCost{.per_result = {.flops = times}}; };
}
Rule per_input(int64_t times) {
  return [times](Inputs inputs) { return BegunCost{.fixed = {.flops = times * elements(inputs)}}; };
}
/// @param weight  its place among the inputs; with one, scale and shift are an operation more
Rule norm(size_t weight, int64_t times = 4) {
  return [weight, times](Inputs inputs) {
    return BegunCost{.fixed = {.flops = (times + is_there(inputs, weight)) * elements(inputs)}};
  };
}

/// Each element of the result is a sum over the last dimension of a factor. @param added  whether an input before the
/// factors is added; a vector is a bias of a layer, which counts in none (LibTorch's Linear is an addmm or a linear)
Rule product(bool added) {
  return [added](Inputs inputs) {
    const at::Tensor factor = tensor_at(inputs, added ? 1 : 0), sum = tensor_at(inputs, 0);
    const int64_t length = factor.defined() && factor.dim() > 0 ? factor.size(-1) : 0;
    return BegunCost{.per_result = of_macs(length, added && sum.defined() && sum.dim() > 1 ? 1 : 0)};
  };
}
BegunCost linear(Inputs inputs) {
  const at::Tensor weight = tensor_at(inputs, 1);
  return {.fixed = of_macs(weight.defined() && weight.dim() > 0 ? elements(inputs) * weight.size(0) : 0)};
}
/// (input, weight, bias, stride, padding, dilation, transposed, …): each place of the output (transposed: of the input)
/// meets each weight once.
BegunCost convolution(Inputs inputs) {
  const at::Tensor input = tensor_at(inputs, 0), weight = tensor_at(inputs, 1);
  const int64_t bias = is_there(inputs, 2) ? 1 : 0;
  if (!input.defined() || !weight.defined() || input.numel() == 0 || weight.numel() == 0) return {};
  if (is_true(inputs, 6))
    return {.fixed = of_macs(input.numel() / input.size(1) * weight.numel()), .per_result = {.flops = bias}};
  return {.per_result = of_macs(weight.numel() / weight.size(0), bias)};
}
/// Scores, and the sums of values that they weigh.
BegunCost attention(Inputs inputs) {
  const at::Tensor query = tensor_at(inputs, 0), key = tensor_at(inputs, 1), value = tensor_at(inputs, 2);
  if (!query.defined() || !key.defined() || !value.defined() || key.dim() < 2) return {};
  return {.fixed = of_macs(query.numel() * key.size(-2) + rows_of(query) * key.size(-2) * value.size(-1))};
}
BegunCost batch_norm(Inputs inputs) {
  return {.fixed = {.flops = ((is_true(inputs, 5) ? 4 : 1) + is_there(inputs, 1)) * elements(inputs)}};
}
/// (input, state, weights, …), the state [layers * directions, batch, hidden]: each matrix meets each row of the input
/// once. @param of_gates  element-wise operations of a step, in hidden sizes
Rule recurrent(int64_t of_gates) {
  return [of_gates](Inputs inputs) {
    const int64_t rows = rows_of(tensor_at(inputs, 0));
    at::Tensor state;
    c10::List<at::Tensor> weights;
    for (const auto& input : inputs.slice(1)) {
      if (!state.defined() && input.isTensor() && input.toTensor().is_floating_point()) state = input.toTensor();
      if (!input.isTensorList()) continue;
      weights = input.toTensorList();  // the last list
      if (!state.defined() && !weights.empty()) state = weights.get(0);
    }
    OperatorCost cost;
    for (const at::Tensor& weight : weights) {
      const bool matrix = weight.dim() == 2;
      cost.flops += rows * (matrix ? 2 * weight.numel() - weight.size(0) : weight.numel());
      if (matrix) cost.macs += rows * weight.numel();
    }
    if (state.defined() && state.dim() >= 2) cost.flops += rows * of_gates * state.size(0) * state.size(-1);
    return BegunCost{.fixed = cost};
  };
}

std::map<std::string_view, Rule> make_rules() {
  std::map<std::string_view, Rule> rules{
      {"linear", linear},
      {"convolution", convolution},
      {"scaled_dot_product_attention", attention},
      {"batch_norm", batch_norm},
      {"layer_norm", norm(2)},
      {"group_norm", norm(2)},
      {"instance_norm", norm(1)},
      {"rms_norm", norm(2, 3)},
      {"softmax", per_input(1)},
      {"log_softmax", per_input(1)},
      {"embedding", per_input(0)},
      {"dropout", per_input(0)},
      {"rnn_tanh", recurrent(1)},
      {"rnn_relu", recurrent(1)},
      {"gru", recurrent(7)},
      {"lstm", recurrent(10)},
  };
  for (const char* name : {"matmul", "mm", "bmm", "mv", "dot"}) rules.emplace(name, product(false));
  for (const char* name : {"addmm", "addmv", "baddbmm"}) rules.emplace(name, product(true));
  for (const char* name : {"add",
                           "sub",
                           "mul",
                           "div",
                           "relu",
                           "relu6",
                           "prelu",
                           "elu",
                           "selu",
                           "celu",
                           "leaky_relu",
                           "silu",
                           "gelu",
                           "mish",
                           "hardtanh",
                           "hardswish",
                           "hardsigmoid",
                           "softplus",
                           "tanh",
                           "sigmoid",
                           "log_sigmoid",
                           "upsample_nearest1d",
                           "upsample_nearest2d",
                           "upsample_nearest3d",
                           "upsample_linear1d",
                           "upsample_bilinear2d",
                           "upsample_trilinear3d",
                           "upsample_bicubic2d"})
    rules.emplace(name, per_result(1));
  for (const char* name :
       {"avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices",
        "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
        "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"})
    rules.emplace(name, per_input(1));
  return rules;
}

}  // namespace

std::optional<BegunCost> BegunCost::of(const at::RecordFunction& function) {
  static const auto rules = make_rules();
  constexpr std::string_view kSpace = "aten::";
  std::string_view name = function.name();
  if (!name.starts_with(kSpace)) return std::nullopt;
  name.remove_prefix(kSpace.size());
  if (name.ends_with('_')) name.remove_suffix(1);  // in place
  const auto rule = rules.find(name);
  if (rule == rules.end()) return std::nullopt;
  return rule->second(function.inputs());
}

OperatorCost BegunCost::end(const at::RecordFunction& function) const {
  int64_t results = 0;
  if (const auto& outputs = function.outputs(); !outputs.empty() && outputs.front().isTensor())
    if (const at::Tensor& first = outputs.front().toTensor(); first.defined()) results = first.numel();
  return {.flops = fixed.flops + per_result.flops * results, .macs = fixed.macs + per_result.macs * results};
}

}  // namespace accelerate::profiler
