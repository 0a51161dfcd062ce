#pragma once

#include "accelerate/models/llama.hpp"
#include "models/json_file.hpp"

namespace accelerate::models {

/// The rotary positions of a config.json, in the form of transformers 5 (rope_parameters, with rope_theta inside) or in
/// that of earlier versions (rope_scaling, which wins, with rope_theta beside it and "type" before "rope_type").
/// @param max_positions  max_position_embeddings
/// @param theta          The base; keeps its value where the file has none.
/// @param share          Of a head's dimensions that are turned; keeps its value where the file has none.
/// @throws CheckpointError if a field that the type needs is missing.
void read_rope(const JsonFile& file, int64_t max_positions, LlamaRopeScaling& scaling, double& theta, double& share);

/// The field rope_scaling of config.json, in the older form, which all versions read; null for "default".
nlohmann::ordered_json to_json(const LlamaRopeScaling& scaling);

}  // namespace accelerate::models
