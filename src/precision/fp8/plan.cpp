#include "precision/fp8/plan.hpp"

#include "utils/raise.hpp"

namespace accelerate {
namespace {

void refuse_field(bool refused, FP8Backend backend, const char* field, const char* of) {
  static constexpr const char* kNames[] = {"te", "ao", "msamp"};
  if (refused)
    raise<ConfigError>("FP8Recipe: {} was given with the back-end {}, expected its default: it acts with {} only",
                       field, kNames[static_cast<size_t>(backend)], of);
}

}  // namespace

void FP8Recipe::validate() const {
  const FP8Recipe defaults;
  const bool te = backend == FP8Backend::te, ao = backend == FP8Backend::ao;
  refuse_field(!te && margin != defaults.margin, backend, "margin", "te");
  refuse_field(!te && interval != defaults.interval, backend, "interval", "te");
  refuse_field(!te && fp8_format != defaults.fp8_format, backend, "fp8_format", "te");
  refuse_field(!te && amax_history_len != defaults.amax_history_len, backend, "amax_history_len", "te");
  refuse_field(!te && amax_compute_algo != defaults.amax_compute_algo, backend, "amax_compute_algo", "te");
  refuse_field(!te && override_linear_precision != defaults.override_linear_precision, backend,
               "override_linear_precision", "te");
  refuse_field(!te && use_autocast_during_eval, backend, "use_autocast_during_eval", "te");
  refuse_field(!te && use_mxfp8_block_scaling, backend, "use_mxfp8_block_scaling", "te");
  refuse_field(!te && use_current_scaling, backend, "use_current_scaling", "te");
  refuse_field(!ao && config != defaults.config, backend, "config", "ao");
  refuse_field(!ao && module_filter_func, backend, "module_filter_func", "ao");
  refuse_field(!ao && pad_inner_dim != defaults.pad_inner_dim, backend, "pad_inner_dim", "ao");
  refuse_field(!ao && enable_fsdp_float8_all_gather != defaults.enable_fsdp_float8_all_gather, backend,
               "enable_fsdp_float8_all_gather", "ao");
  refuse_field(backend != FP8Backend::msamp && opt_level != defaults.opt_level, backend, "opt_level", "msamp");
  if (margin < -120 || margin > 120)
    raise<ConfigError>("FP8Recipe: margin is {}, expected -120 to 120: scales are divided by 2^margin", margin);
  if (interval < 1) raise<ConfigError>("FP8Recipe: interval is {}, expected 1 update or more", interval);
  if (amax_history_len < 1)
    raise<ConfigError>("FP8Recipe: amax_history_len is {}, expected 1 entry or more", amax_history_len);
  if (use_mxfp8_block_scaling && use_current_scaling)
    throw ConfigError(
        "FP8Recipe: use_mxfp8_block_scaling and use_current_scaling are both set, expected one of them at most: "
        "they are different ways to choose scales");
  if (use_mxfp8_block_scaling || use_current_scaling) {
    const char* of = "delayed scaling: leave use_mxfp8_block_scaling and use_current_scaling off";
    refuse_field(margin != defaults.margin, backend, "margin", of);
    refuse_field(interval != defaults.interval, backend, "interval", of);
    refuse_field(amax_history_len != defaults.amax_history_len, backend, "amax_history_len", of);
    refuse_field(amax_compute_algo != defaults.amax_compute_algo, backend, "amax_compute_algo", of);
  }
}

namespace fp8 {

codes::Float8 forward_format(const FP8Recipe& recipe) {
  return recipe.fp8_format == FP8Format::e5m2 ? codes::Float8::e5m2 : codes::Float8::e4m3;
}

codes::Float8 backward_format(const FP8Recipe& recipe) {
  return recipe.fp8_format == FP8Format::e4m3 ? codes::Float8::e4m3 : codes::Float8::e5m2;
}

ProductPlan plan_of(const FP8Recipe& recipe) {
  using codes::Float8;
  ProductPlan plan;
  if (recipe.backend == FP8Backend::ao && recipe.config != AORecipe::tensorwise) {
    // torchao's: E4M3 throughout, scales that are powers of two.
    const Cast row{Scaling::row, Float8::e4m3, true};
    plan.x = plan.w = plan.g_for_x = plan.w_for_x = plan.g_for_w = plan.x_for_w = row;
    if (recipe.config == AORecipe::rowwise_with_gw_hp) {
      plan.w_for_x = {Scaling::tensor, Float8::e4m3, true};
      plan.g_for_w = plan.x_for_w = {};
    }
  } else {
    Scaling scaling = Scaling::tensor;
    if (recipe.backend == FP8Backend::te && !recipe.use_current_scaling)
      scaling = recipe.use_mxfp8_block_scaling ? Scaling::block : Scaling::delayed;
    plan.x = plan.w = plan.w_for_x = plan.x_for_w = {scaling, forward_format(recipe)};
    plan.g_for_x = plan.g_for_w = {scaling, backward_format(recipe)};
  }
  const auto [fprop, dgrad, wgrad] = recipe.override_linear_precision;
  if (fprop) plan.x = plan.w = {};
  if (dgrad) plan.g_for_x = plan.w_for_x = {};
  if (wgrad) plan.g_for_w = plan.x_for_w = {};
  plan.rounds_gradient = recipe.backend == FP8Backend::msamp;
  plan.pads = recipe.backend != FP8Backend::ao || recipe.pad_inner_dim;
  return plan;
}

}  // namespace fp8
}  // namespace accelerate
