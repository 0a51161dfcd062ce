#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>

#include "adapters/lora_config.hpp"

namespace accelerate::detail {

inline constexpr const char* kPrefix = "base_model.model.";  ///< of all names in PEFT's files

/// An adapter as it lies in its folder, without a model.
struct AdapterFile {
  LoraConfig config;
  /// By the module's path: A [rank, inputs] and B [outputs, rank], with the rank that the config has for it.
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> pairs;
  bool whole_names = false;  ///< as LoadedConfig
};

/// @throws CheckpointError for what is no adapter, or not a whole one, by the tensor's name
AdapterFile read_adapter(const std::filesystem::path& folder);

}  // namespace accelerate::detail
