#pragma once

#include <optional>
#include <vector>

#include "accelerate/accelerator.hpp"
#include "accelerate/precision/fp8.hpp"
#include "accelerate/precision/fp8_kwargs.hpp"

/// Which fp8 recipe does a run use?
namespace accelerate {

/// What the handlers, or else the environment, say of fp8; resolved.
struct ChosenFp8 {
  FP8BackendType backend = FP8BackendType::NO;
  // That of the back end; the others as by default. Of a deprecated FP8RecipeKwargs its part.
  AORecipeKwargs ao;
  TERecipeKwargs te;
  MSAMPRecipeKwargs msamp;
  FP8Recipe recipe;  ///< made from it
};

/// @param precision  that of the run
/// @param sharded    models are (FSDP)
/// @throws ConfigError for several recipes, one without mixed_precision "fp8", and values that don't fit.
ChosenFp8 choose_fp8(const std::vector<KwargsHandler>& handlers, PrecisionType precision, bool sharded);

/// Whether scales come from the past (delayed scaling).
bool remembers_scales(const FP8Recipe& recipe);

/// What an Accelerator will run with, before it joins a group. @throws ConfigError for other names.
PrecisionType precision_to_be(const AcceleratorOptions& options);

}  // namespace accelerate
