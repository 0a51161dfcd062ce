#pragma once

#include <variant>

#include "accelerate/precision/fp8.hpp"
#include "accelerate/precision/fp8_kwargs.hpp"
#include "accelerate/state.hpp"

/// Which fp8 recipe does a run use?
namespace accelerate {

/// The handler that a program gives; nothing: none.
using GivenFP8 = std::variant<std::monostate, AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs, FP8RecipeKwargs>;
/// "AORecipeKwargs", …; "" of none.
const char* name_of(const GivenFP8& given);

/// The settings of one back end; the others as by default.
struct FP8Settings {
  AORecipeKwargs ao;
  TERecipeKwargs te;
  MSAMPRecipeKwargs msamp;
};
/// The settings that were given; a deprecated FP8RecipeKwargs gives both parts.
FP8Settings settings_of(const GivenFP8& given);

/// The fp8 settings of the handler, or else of the environment; resolved.
struct ChosenFP8 {
  FP8BackendType backend = FP8BackendType::NO;
  FP8Settings settings;
  FP8Recipe recipe;  ///< made from its
};

/// @param precision  that of the run
/// @param sharded    models are (FSDP)
/// @throws ConfigError for a recipe without mixed_precision "fp8", and values that don't fit.
ChosenFP8 choose_fp8(const GivenFP8& given, PrecisionType precision, bool sharded);

/// Whether scales come from the past (delayed scaling).
bool remembers_scales(const FP8Recipe& recipe);

}  // namespace accelerate
