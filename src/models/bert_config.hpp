#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "accelerate/models/bert.hpp"

namespace accelerate::models {

/// Weights as BERT was trained from: normal with the configured deviation, no bias, neutral layer norms, nothing for
/// padding.
/// @param name  Of the parameter, in Hugging Face's spelling.
void initialize(const std::string& name, const at::Tensor& parameter, const BertConfig& config);

/// The text of config.json. @param architecture  The Python class that the weights belong to. @param dtype  Of the
/// weights, e.g. "float32".
std::string to_json(const BertConfig& config, const std::string& architecture, const std::string& dtype);

}  // namespace accelerate::models
