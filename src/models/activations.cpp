#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/erf.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/tanh.h>

#include <numbers>

#include "models/activations.hpp"
#include "utils/raise.hpp"
#include "utils/strings_of.hpp"

namespace accelerate::models {
namespace {

at::Tensor exact_gelu(const at::Tensor& x) { return at::gelu(x); }
at::Tensor tanh_gelu(const at::Tensor& x) { return at::gelu(x, "tanh"); }
at::Tensor clipped_gelu(const at::Tensor& x) { return at::gelu(x).clamp(-10, 10); }
at::Tensor quick_gelu(const at::Tensor& x) { return x * at::sigmoid(1.702 * x); }
at::Tensor relu(const at::Tensor& x) { return at::relu(x); }
at::Tensor squared_relu(const at::Tensor& x) { return at::relu(x).square(); }
at::Tensor relu6(const at::Tensor& x) { return at::clamp(x, 0, 6); }
at::Tensor leaky_relu(const at::Tensor& x) { return at::leaky_relu(x); }
at::Tensor silu(const at::Tensor& x) { return at::silu(x); }
at::Tensor hardswish(const at::Tensor& x) { return at::hardswish(x); }
at::Tensor mish(const at::Tensor& x) { return at::mish(x); }
at::Tensor tanh(const at::Tensor& x) { return at::tanh(x); }
at::Tensor sigmoid(const at::Tensor& x) { return at::sigmoid(x); }
at::Tensor linear(const at::Tensor& x) { return x; }
at::Tensor root_of_softplus(const at::Tensor& x) { return at::softplus(x).sqrt(); }
/// The normal distribution's integral that comes closest to squared_relu. Source: arXiv:2209.10655.
at::Tensor laplace(const at::Tensor& x) {
  return 0.5 * (1.0 + at::erf((x - 0.707107) / (0.282095 * std::numbers::sqrt2)));
}

// All that transformers has but prelu and xielu, which have weights of their own.
constexpr std::pair<const char*, Activation> kActivations[] = {
    {"gelu", exact_gelu},
    {"gelu_python", exact_gelu},
    // Five Python implementations of one formula.
    {"gelu_new", tanh_gelu},
    {"gelu_fast", tanh_gelu},
    {"gelu_pytorch_tanh", tanh_gelu},
    {"gelu_python_tanh", tanh_gelu},
    {"gelu_accurate", tanh_gelu},
    {"gelu_10", clipped_gelu},
    {"quick_gelu", quick_gelu},
    {"relu", relu},
    {"relu2", squared_relu},
    {"relu6", relu6},
    {"leaky_relu", leaky_relu},
    {"silu", silu},
    {"swish", silu},
    {"hardswish", hardswish},
    {"mish", mish},
    {"tanh", tanh},
    {"sigmoid", sigmoid},
    {"linear", linear},
    {"laplace", laplace},
    {"sqrtsoftplus", root_of_softplus},
};

}  // namespace

std::optional<Activation> find_activation(const std::string& name) {
  for (const auto& [known, function] : kActivations)
    if (name == known) return function;
  return std::nullopt;
}

std::string known_activations() {
  return fmt::format("{}", fmt::join(strings_of(kActivations, [](const auto& one) { return one.first; }), ", "));
}

Activation read_activation(const JsonFile& config, const char* key, std::string name) {
  config.read(key, name);
  const auto found = find_activation(name);
  if (!found) config.fail(key, name, "one of " + known_activations());
  return *found;
}

}  // namespace accelerate::models
