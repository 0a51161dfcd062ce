#pragma once

#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "models/json_file.hpp"

namespace accelerate::models {

using Activation = at::Tensor (*)(const at::Tensor&);

/// By its name in config.json; empty if it is not known.
std::optional<Activation> find_activation(const std::string& name);
/// The names, for messages.
std::string known_activations();
/// The one that a field of config.json names. @throws CheckpointError if it is not known.
Activation read_activation(const JsonFile& config, const char* key, std::string name);

}  // namespace accelerate::models
