#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "models/json_file.hpp"

/// Code that image classifiers share.
namespace accelerate::models {

/// How many outputs the head has: "num_labels", else as many as "id2label" has names, else 2, transformers' default.
int64_t count_labels(const JsonFile& config);

/// @throws ShapeError unless `pixel_values` is [B, channels, height, width]. @param model  For the message.
void check_images(const std::string& model, const at::Tensor& pixel_values, int64_t channels);

/// Fresh weights of convolutional networks: convolutions and linear layers normal with a variance of 2 over their
/// outputs, norms neutral, biases 0. Source: arXiv:1502.01852.
void initialize_convolutional(const std::string& name, const at::Tensor& parameter);

}  // namespace accelerate::models
