#pragma once

#include <filesystem>
#include <string>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

/// Entries that checkpoints have besides a model's weights, and that nobody misses.
namespace accelerate::bigmodel {

/// Whether there is something besides the model's weights, nothing but that and a head that is a copy of the embeddings
/// it is tied to; and the model's weights are all there.
ACCELERATE_API bool has_left_over_only(const ModelRef& model, const std::filesystem::path& checkpoint);

}  // namespace accelerate::bigmodel
