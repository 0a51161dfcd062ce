#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "formats/gguf_header.hpp"
#include "formats/gguf_names.hpp"

namespace accelerate::formats {

/// The text of config.json. @param rope_factors  The decoded numbers of the tensor rope_freqs.weight; null where there
/// is none. @throws CheckpointError as GgufFile::config_json
std::string gguf_config_json(const GgufHeader& header, const std::string& file, const float* rope_factors);

/// The reverse: what a config.json amounts to in a GGUF file.
struct GgufModel {
  GgufForm form;
  std::vector<std::string> entries;  ///< of gguf_entry(): sizes and numbers below the architecture's name
  int64_t vocabulary = 0;            ///< rows of the embeddings
  std::vector<float> rope_factors;   ///< of the tensor rope_freqs.weight; empty: there is none
  std::vector<std::string> notes;    ///< what can't be said there, and changes little; a sentence each
};

/// The form of llama, mistral, mixtral, qwen2 and gpt2. @param source  begins messages. @throws ConfigError for other
/// architectures, CheckpointError for fields that are missing or that the format has no place for
GgufModel gguf_model(const nlohmann::json& config, const std::string& source);

}  // namespace accelerate::formats
