#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>

#include "adapters/lora_config.hpp"

namespace accelerate::detail {

inline constexpr const char* kPrefix = "base_model.model.";  ///< of all names in PEFT's files
inline constexpr const char* kBaseLayer = ".base_layer";     ///< before the names of an adapted module's own tensors
inline constexpr const char* kRows = ".token_adapter.trainable_tokens_delta";

/// An adapter as it lies in its folder, without a model.
struct AdapterFile {
  LoraConfig config;
  /// By the module's path: A [rank, inputs] and B [outputs, rank], with the rank that the config has for it.
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> pairs;
  /// Tensors of the model itself, by its names for parameters.
  std::map<std::string, at::Tensor> whole;
  /// Rows of embeddings, by the embedding's path.
  std::map<std::string, at::Tensor> rows;
  bool whole_names = false;  ///< as LoadedConfig
  std::filesystem::path file;
};

/// @throws CheckpointError for what is no adapter, or not a whole one, by the tensor's name
AdapterFile read_adapter(const std::filesystem::path& folder);

}  // namespace accelerate::detail
