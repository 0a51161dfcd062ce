#include <ATen/ops/clamp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>

#include "models/activations.hpp"

namespace accelerate::models {
namespace {

at::Tensor exact_gelu(const at::Tensor& x) { return at::gelu(x); }
at::Tensor tanh_gelu(const at::Tensor& x) { return at::gelu(x, "tanh"); }
at::Tensor relu(const at::Tensor& x) { return at::relu(x); }
at::Tensor relu6(const at::Tensor& x) { return at::clamp(x, 0, 6); }
at::Tensor silu(const at::Tensor& x) { return at::silu(x); }
at::Tensor tanh(const at::Tensor& x) { return at::tanh(x); }

constexpr std::pair<const char*, Activation> kActivations[] = {
    {"gelu", exact_gelu},
    // Three Python implementations of one formula.
    {"gelu_new", tanh_gelu},
    {"gelu_fast", tanh_gelu},
    {"gelu_pytorch_tanh", tanh_gelu},
    {"relu", relu},
    {"relu6", relu6},
    {"silu", silu},
    {"swish", silu},
    {"tanh", tanh},
};

}  // namespace

std::optional<Activation> find_activation(const std::string& name) {
  for (const auto& [known, function] : kActivations)
    if (name == known) return function;
  return std::nullopt;
}

std::string known_activations() {
  std::string names;
  for (const auto& row : kActivations) names.append(names.empty() ? "" : ", ").append(row.first);
  return names;
}

Activation read_activation(const JsonFile& config, const char* key, std::string name) {
  config.read(key, name);
  const auto found = find_activation(name);
  if (!found) config.fail(key, name, "one of " + known_activations());
  return *found;
}

}  // namespace accelerate::models
