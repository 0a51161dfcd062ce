#pragma once

#include "models/json_file.hpp"

namespace accelerate::models {

/// Fields that change what transformers makes of any language model, and that no architecture here has. @throws
/// CheckpointError naming the one that is set.
inline void refuse_foreign_fields(const JsonFile& file) {
  if (!file.get("is_causal", true))
    file.fail("is_causal", false, "true: decoders that see the tokens behind are not supported");
  if (const auto found = file.root().find("per_layer_config"); found != file.root().end() && !found->empty())
    file.fail("per_layer_config", *found, "none: layers that differ are not supported");
}

/// Weights in somebody else's codes look like weights and are not. @throws CheckpointError
inline void refuse_quantized(const JsonFile& file) {
  const auto found = file.root().find("quantization_config");
  if (found == file.root().end() || found->empty()) return;
  file.fail("quantization_config", *found,
            "none: weights in few bits are loaded by AutoModelForCausalLM, AutoModelForSeq2SeqLM or AutoModel, or by "
            "load_and_quantize_model(); or load the model that they were made of");
}

}  // namespace accelerate::models
