#include "precision/chosen_fp8.hpp"

#include <map>
#include <string>

#include "precision/delayed_fields.hpp"
#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate {

const char* name_of(const GivenFP8& given) {
  constexpr const char* kNames[] = {"", "AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs", "FP8RecipeKwargs"};
  return kNames[given.index()];
}

FP8Settings settings_of(const GivenFP8& given) {
  FP8Settings settings;
  if (const auto* ao = std::get_if<AORecipeKwargs>(&given)) settings.ao = *ao;
  if (const auto* te = std::get_if<TERecipeKwargs>(&given)) settings.te = *te;
  if (const auto* msamp = std::get_if<MSAMPRecipeKwargs>(&given)) settings.msamp = *msamp;
  if (const auto* all = std::get_if<FP8RecipeKwargs>(&given)) {
    settings.msamp.opt_level = all->opt_level;
    for_each_delayed_field([](const char*, auto& to, const auto& from) { to = from; }, settings.te, *all);
  }
  return settings;
}

namespace {

/// Takes the part of `given` that is for its back end, resolved.
void take(ChosenFP8& fp8, const GivenFP8& given) {
  if (const auto* all = std::get_if<FP8RecipeKwargs>(&given)) {
    const FP8RecipeKwargs resolved = resolve(*all);
    const auto parts = settings_of(resolved);
    return *resolved.backend == "MSAMP" ? take(fp8, parts.msamp) : take(fp8, parts.te);
  }
  if (const auto* ao = std::get_if<AORecipeKwargs>(&given))
    fp8.backend = FP8BackendType::AO, fp8.settings.ao = resolve(*ao);
  if (const auto* te = std::get_if<TERecipeKwargs>(&given))
    fp8.backend = FP8BackendType::TE, fp8.settings.te = resolve(*te);
  if (const auto* msamp = std::get_if<MSAMPRecipeKwargs>(&given))
    fp8.backend = FP8BackendType::MSAMP, fp8.settings.msamp = resolve(*msamp);
}

FP8Recipe recipe_of(FP8BackendType backend, const FP8Settings& fp8) {
  FP8Recipe recipe;
  switch (backend) {
    case FP8BackendType::NO:
      break;
    case FP8BackendType::AO: {
      const auto& config = *fp8.ao.config;
      static const std::map<std::string, AORecipe> recipes{{"tensorwise", AORecipe::tensorwise},
                                                           {"rowwise", AORecipe::rowwise},
                                                           {"rowwise_with_gw_hp", AORecipe::rowwise_with_gw_hp}};
      recipe.backend = FP8Backend::ao;
      recipe.config = recipes.at(config.recipe);
      recipe.module_filter_func = fp8.ao.module_filter_func;
      recipe.pad_inner_dim = config.pad_inner_dim;
      recipe.enable_fsdp_float8_all_gather = config.enable_fsdp_float8_all_gather;
      break;
    }
    case FP8BackendType::TE:
      recipe.backend = FP8Backend::te;
      recipe.use_autocast_during_eval = *fp8.te.use_autocast_during_eval;
      recipe.margin = *fp8.te.margin;
      recipe.interval = *fp8.te.interval;
      recipe.fp8_format = *fp8.te.fp8_format == "HYBRID" ? FP8Format::hybrid
                          : *fp8.te.fp8_format == "E4M3" ? FP8Format::e4m3
                                                         : FP8Format::e5m2;
      recipe.amax_history_len = *fp8.te.amax_history_len;
      recipe.amax_compute_algo =
          *fp8.te.amax_compute_algo == "max" ? AmaxComputeAlgo::max : AmaxComputeAlgo::most_recent;
      recipe.override_linear_precision = *fp8.te.override_linear_precision;
      recipe.use_mxfp8_block_scaling = *fp8.te.use_mxfp8_block_scaling;
      break;
    case FP8BackendType::MSAMP:
      recipe.backend = FP8Backend::msamp;
      recipe.opt_level = *fp8.msamp.opt_level == "O1" ? MSAMPOptLevel::O1 : MSAMPOptLevel::O2;
      break;
  }
  recipe.validate();
  return recipe;
}

}  // namespace

bool remembers_scales(const FP8Recipe& recipe) {
  return recipe.backend != FP8Backend::ao && !recipe.use_mxfp8_block_scaling && !recipe.use_current_scaling;
}

ChosenFP8 choose_fp8(const GivenFP8& given, PrecisionType precision, bool sharded) {
  ChosenFP8 fp8;
  take(fp8, given);
  if (given.index() > 0 && precision != PrecisionType::FP8)
    raise<ConfigError>(
        "Accelerator: kwargs_handlers holds {}, but mixed_precision is '{}', expected 'fp8'; set mixed_precision, or "
        "leave the recipe out",
        name_of(given), to_string(precision));
  if (precision != PrecisionType::FP8) return fp8;
  if (given.index() == 0) {
    const auto backend = fp8_backend_from_string(environment::text("ACCELERATE_FP8_BACKEND").value_or("NO"));
    if (backend == FP8BackendType::TE) take(fp8, TERecipeKwargs{});
    else if (backend == FP8BackendType::MSAMP) take(fp8, MSAMPRecipeKwargs{});
    else take(fp8, AORecipeKwargs{});
  }
  if (fp8.backend == FP8BackendType::MSAMP && sharded)
    throw ConfigError(
        "Accelerator: the fp8 recipe is MS-AMP's, but models are sharded (FSDP), expected AO or TE: what MS-AMP adds "
        "are gradients that travel as fp8 in data parallelism, and a shard's gradient travels as "
        "mixed_precision_policy.reduce_dtype says; use AORecipeKwargs or TERecipeKwargs (--fp8_backend ao or te)");
  fp8.recipe = recipe_of(fp8.backend, fp8.settings);
  return fp8;
}

}  // namespace accelerate
