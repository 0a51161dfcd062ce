#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "accelerate/models/llama.hpp"

namespace accelerate::models {

/// Weights as LLaMA is trained from: normal with the configured deviation, no bias, neutral norms, nothing for padding.
/// @param name  Of the parameter, in Hugging Face's spelling.
void initialize(const std::string& name, const at::Tensor& parameter, const LlamaConfig& config);

/// The text of config.json. @param architecture  The Python class that the weights belong to. @param dtype  Of the
/// weights, e.g. "float32".
std::string to_json(const LlamaConfig& config, const std::string& architecture, const std::string& dtype);

}  // namespace accelerate::models
