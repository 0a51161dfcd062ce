#include "accelerator/fp8.hpp"

#include <map>
#include <string>
#include <variant>

#include "utils/environment.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

const char* name_of(const AORecipeKwargs&) { return "AORecipeKwargs"; }
const char* name_of(const TERecipeKwargs&) { return "TERecipeKwargs"; }
const char* name_of(const MSAMPRecipeKwargs&) { return "MSAMPRecipeKwargs"; }
const char* name_of(const FP8RecipeKwargs&) { return "FP8RecipeKwargs"; }

template <class T>
concept Fp8Handler = requires(const T& kwargs) {
  name_of(kwargs);
};

void take(ChosenFp8& fp8, const AORecipeKwargs& kwargs) {
  fp8.backend = FP8BackendType::AO;
  fp8.ao = resolve(kwargs);
}
void take(ChosenFp8& fp8, const TERecipeKwargs& kwargs) {
  fp8.backend = FP8BackendType::TE;
  fp8.te = resolve(kwargs);
}
void take(ChosenFp8& fp8, const MSAMPRecipeKwargs& kwargs) {
  fp8.backend = FP8BackendType::MSAMP;
  fp8.msamp = resolve(kwargs);
}
void take(ChosenFp8& fp8, const FP8RecipeKwargs& kwargs) {
  const FP8RecipeKwargs all = resolve(kwargs);
  if (*all.backend == "MSAMP") return take(fp8, MSAMPRecipeKwargs{.opt_level = all.opt_level});
  take(fp8, TERecipeKwargs{.use_autocast_during_eval = all.use_autocast_during_eval,
                           .margin = all.margin,
                           .interval = all.interval,
                           .fp8_format = all.fp8_format,
                           .amax_history_len = all.amax_history_len,
                           .amax_compute_algo = all.amax_compute_algo,
                           .override_linear_precision = all.override_linear_precision,
                           .use_mxfp8_block_scaling = all.use_mxfp8_block_scaling});
}

FP8Recipe recipe_of(const ChosenFp8& fp8) {
  FP8Recipe recipe;
  switch (fp8.backend) {
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

PrecisionType precision_to_be(const AcceleratorOptions& options) {
  if (AcceleratorState::initialized()) return AcceleratorState().mixed_precision();
  if (options.mixed_precision) return precision_from_string(*options.mixed_precision);
  return precision_from_string(environment::text("ACCELERATE_MIXED_PRECISION").value_or("no"));
}

ChosenFp8 choose_fp8(const std::vector<KwargsHandler>& handlers, PrecisionType precision, bool sharded) {
  ChosenFp8 fp8;
  const char* given = nullptr;
  for (const auto& handler : handlers)
    std::visit(
        [&](const auto& kwargs) {
          if constexpr (Fp8Handler<std::decay_t<decltype(kwargs)>>) {
            if (given)
              raise<ConfigError>(
                  "Accelerator: kwargs_handlers holds {} and {}, expected one recipe of fp8: a product is computed by "
                  "one "
                  "of them; leave the other out",
                  given, name_of(kwargs));
            given = name_of(kwargs);
            take(fp8, kwargs);
          }
        },
        handler);
  if (given && precision != PrecisionType::FP8)
    raise<ConfigError>(
        "Accelerator: kwargs_handlers holds {}, but mixed_precision is '{}', expected 'fp8'; set mixed_precision, or "
        "leave the recipe out",
        given, to_string(precision));
  if (precision != PrecisionType::FP8) return fp8;
  if (!given) {
    const auto backend = fp8_backend_from_string(environment::text("ACCELERATE_FP8_BACKEND").value_or("NO"));
    if (backend == FP8BackendType::TE) take(fp8, TERecipeKwargs{});
    else if (backend == FP8BackendType::MSAMP) take(fp8, MSAMPRecipeKwargs{});
    else take(fp8, AORecipeKwargs{});
  }
  if (fp8.backend == FP8BackendType::MSAMP && sharded)
    throw ConfigError(
        "Accelerator: the fp8 recipe is MS-AMP's, but models are sharded (FSDP), expected AO or TE: what MS-AMP adds "
        "are "
        "gradients that travel as fp8 in data parallelism, and a shard's gradient travels as "
        "mixed_precision_policy.reduce_dtype says; use AORecipeKwargs or TERecipeKwargs (--fp8_backend ao or te)");
  fp8.recipe = recipe_of(fp8);
  return fp8;
}

}  // namespace accelerate
