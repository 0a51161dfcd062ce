#pragma once

namespace accelerate {

/// The fields that TERecipeKwargs and the deprecated FP8RecipeKwargs share: f(name, that field of each).
template <class F, class... Kwargs> void for_each_delayed_field(F&& f, Kwargs&... kwargs) {
  f("use_autocast_during_eval", kwargs.use_autocast_during_eval...);
  f("margin", kwargs.margin...);
  f("interval", kwargs.interval...);
  f("fp8_format", kwargs.fp8_format...);
  f("amax_history_len", kwargs.amax_history_len...);
  f("amax_compute_algo", kwargs.amax_compute_algo...);
  f("override_linear_precision", kwargs.override_linear_precision...);
  f("use_mxfp8_block_scaling", kwargs.use_mxfp8_block_scaling...);
}

}  // namespace accelerate
