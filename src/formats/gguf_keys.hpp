#pragma once

#include "formats/gguf_fields.hpp"

namespace accelerate::formats {

/// Refuses what the metadata says about the model and this library does not act on: a key below the architecture's
/// name that is not known, or whose value asks for something that the models here don't have.
/// @throws CheckpointError naming the key, its value and what it is about
void check_gguf_keys(const GgufMetadata& metadata, const GgufFields& fields);

}  // namespace accelerate::formats
