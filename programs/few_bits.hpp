#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include <accelerate/bigmodel/quantize.hpp>
#include <accelerate/utils/error.hpp>

#include "utils/json.hpp"
#include "utils/read_file.hpp"

/// How a folder's weights are in few bits, as its config.json says; nothing for other folders and .gguf files.
/// @throws ConfigError for another method than bitsandbytes'
inline std::optional<accelerate::BnbQuantizationConfig> quantization_of(const std::filesystem::path& checkpoint) {
  const auto file = checkpoint / "config.json";
  if (!accelerate::is_folder(checkpoint) || !accelerate::is_there(file)) return std::nullopt;
  const auto text = accelerate::read_text<accelerate::CheckpointError>("", file, accelerate::kMostSettingsBytes);
  const auto json = accelerate::parse_json<nlohmann::json>(text);
  if (!json.is_object() || !json.contains("quantization_config") || json["quantization_config"].is_null())
    return std::nullopt;
  return accelerate::BnbQuantizationConfig::from_json(text);
}
