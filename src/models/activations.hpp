#pragma once

#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

namespace accelerate::models {

using Activation = at::Tensor (*)(const at::Tensor&);

/// By its name in config.json; empty if it is not known.
std::optional<Activation> find_activation(const std::string& name);
/// The names, for messages.
std::string known_activations();

}  // namespace accelerate::models
