#pragma once

#include <filesystem>
#include <optional>

#include "accelerate/models/auto_model.hpp"
#include "models/architecture.hpp"

/// Loading as from_pretrained() of the Auto classes does it by its options.
namespace accelerate::models {

/// How a model's weights come from its files, decided before it is built.
struct AutoLoadPlan {
  std::optional<at::ScalarType> dtype;                ///< of numbers; unset: fp32
  std::optional<BnbQuantizationConfig> quantization;  ///< as it was asked for, or as the folder's config.json says
  bool dispatches = false;                            ///< load_in_places() loads it; else the model's own memory does
};
/// @throws ConfigError for options that can't be; CheckpointError for a config.json that can't be read
AutoLoadPlan plan_auto_load(const std::filesystem::path& checkpoint, const AutoLoadOptions& options);

/// Loads a model that has no memory yet; its forwards take inputs from any device from then on, and keep what is
/// returned.
/// @throws as load_checkpoint_and_dispatch() and load_and_quantize_model()
DispatchedModel load_in_places(Architecture& model, const std::filesystem::path& checkpoint,
                               const AutoLoadOptions& options, const AutoLoadPlan& plan, LoadReport* report);

}  // namespace accelerate::models
