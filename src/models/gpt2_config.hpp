#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include "accelerate/models/gpt2.hpp"
#include "models/json_file.hpp"

namespace accelerate::models {

/// Weights as GPT-2 was trained from. @param name  Of the parameter, in Hugging Face's spelling.
void initialize(const std::string& name, const at::Tensor& parameter, const GPT2Config& config);

/// The text of config.json. @param architecture  The Python class that the weights belong to. @param dtype  Of the
/// weights, e.g. "float32".
std::string to_json(const GPT2Config& config, const std::string& architecture, const std::string& dtype);

/// Names that fields of GPT-2's and GPT-J's config.json go by elsewhere become their own.
void rename_gpt2_fields(JsonFile& file);

}  // namespace accelerate::models
