#include "accelerate/precision/fp8_kwargs.hpp"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "precision/delayed_fields.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

std::string changed(std::string text, int (*change)(int)) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [change](unsigned char c) { return static_cast<char>(change(c)); });
  return text;
}
std::string upper(std::string text) { return changed(std::move(text), std::toupper); }
std::string lower(std::string text) { return changed(std::move(text), std::tolower); }

void check_choice(const char* field, const char* variable, const std::string& value,
                  std::initializer_list<std::string_view> choices) {
  if (std::find(choices.begin(), choices.end(), value) == choices.end())
    raise<ConfigError>("fp8: {} is '{}', expected {}; see {}", field, value,
                       fmt::join(choices.begin(), choices.end(), " or "), variable);
}

void check_at_least_1(const char* field, const char* variable, int64_t value) {
  if (value < 1) raise<ConfigError>("fp8: {} is {}, expected at least 1; see {}", field, value, variable);
}

bool flag(const char* name, bool otherwise) { return environment::flag(name).value_or(otherwise); }

/// TERecipeKwargs, and FP8RecipeKwargs, which has the same fields.
template <class Kwargs> void resolve_delayed(Kwargs& kwargs) {
  if (!kwargs.use_autocast_during_eval)
    kwargs.use_autocast_during_eval = flag("ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL", false);
  if (!kwargs.margin) kwargs.margin = environment::integer({"ACCELERATE_FP8_MARGIN"}).value_or(0);
  if (!kwargs.interval) kwargs.interval = environment::integer({"ACCELERATE_FP8_INTERVAL"}).value_or(1);
  if (!kwargs.fp8_format) kwargs.fp8_format = environment::text("ACCELERATE_FP8_FORMAT").value_or("HYBRID");
  kwargs.fp8_format = upper(*kwargs.fp8_format);
  check_choice("fp8_format", "ACCELERATE_FP8_FORMAT", *kwargs.fp8_format, {"HYBRID", "E4M3", "E5M2"});
  if (!kwargs.amax_compute_algo)
    kwargs.amax_compute_algo = environment::text("ACCELERATE_FP8_AMAX_COMPUTE_ALGO").value_or("most_recent");
  kwargs.amax_compute_algo = lower(*kwargs.amax_compute_algo);
  check_choice("amax_compute_algo", "ACCELERATE_FP8_AMAX_COMPUTE_ALGO", *kwargs.amax_compute_algo,
               {"max", "most_recent"});
  if (!kwargs.amax_history_len)
    kwargs.amax_history_len = environment::integer({"ACCELERATE_FP8_AMAX_HISTORY_LEN"}).value_or(1024);
  if (!kwargs.override_linear_precision)
    kwargs.override_linear_precision =
        std::array{flag("ACCELERATE_FP8_OVERRIDE_FPROP", false), flag("ACCELERATE_FP8_OVERRIDE_DGRAD", false),
                   flag("ACCELERATE_FP8_OVERRIDE_WGRAD", false)};
  if (!kwargs.use_mxfp8_block_scaling)
    kwargs.use_mxfp8_block_scaling = flag("ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", false);
  check_at_least_1("interval", "ACCELERATE_FP8_INTERVAL", *kwargs.interval);
  check_at_least_1("amax_history_len", "ACCELERATE_FP8_AMAX_HISTORY_LEN", *kwargs.amax_history_len);
  if (!*kwargs.use_mxfp8_block_scaling) return;
  // The first two are the reference's rule; the others follow Transformer Engine, whose MXFP8 does not have them.
  const auto refuse = [](bool differs, const char* field) {
    if (differs)
      raise<ConfigError>(
          "fp8: {} is given together with use_mxfp8_block_scaling, whose scales are those of the blocks of a tensor as "
          "it is now, so that nothing is remembered, expected one of them; leave it out",
          field);
  };
  refuse(*kwargs.amax_compute_algo != "most_recent", "amax_compute_algo");
  refuse(*kwargs.amax_history_len != 1024, "amax_history_len");
  refuse(*kwargs.margin != 0, "margin");
  refuse(*kwargs.interval != 1, "interval");
}

template <class Kwargs> void resolve_level(Kwargs& kwargs) {
  if (!kwargs.opt_level) kwargs.opt_level = environment::text("ACCELERATE_FP8_OPT_LEVEL").value_or("O2");
  check_choice("opt_level", "ACCELERATE_FP8_OPT_LEVEL", *kwargs.opt_level, {"O1", "O2"});
}

/// Fields of FP8RecipeKwargs that its back end does not have. A field that is as by default says nothing, and may be
/// what resolve() has put there; the environment may hold the settings of all back ends.
void refuse_without_effect(const FP8RecipeKwargs& resolved) {
  const auto refuse = [&](bool differs, const char* field, const char* backend) {
    if (differs)
      raise<ConfigError>(
          "fp8: FP8RecipeKwargs::{} is given with the backend {}, expected {}, the one that has it: it would have no "
          "effect; leave it out, or set backend = \"{}\"",
          field, *resolved.backend, backend, backend);
  };
  FP8RecipeKwargs without;
  if (*resolved.backend == "TE") {
    resolve_level(without);
    return refuse(resolved.opt_level != without.opt_level, "opt_level", "MSAMP");
  }
  resolve_delayed(without);
  for_each_delayed_field(
      [&](const char* name, const auto& given, const auto& otherwise) { refuse(given != otherwise, name, "TE"); },
      resolved, without);
}

template <class T> KwargsValue or_null(const std::optional<T>& field) {
  return field ? KwargsValue(*field) : KwargsValue(nullptr);
}

KwargsValue or_null(const std::optional<std::array<bool, 3>>& field) {
  return field ? KwargsValue(std::vector<bool>(field->begin(), field->end())) : KwargsValue(nullptr);
}

template <class Kwargs> KwargsDict delayed_dict(const Kwargs& kwargs) {
  KwargsDict dict;
  for_each_delayed_field([&](const char* name, const auto& field) { dict[name] = or_null(field); }, kwargs);
  return dict;
}

void warn_once(std::atomic<bool>& said, const char* text) {
  if (said.exchange(true)) return;
  // All ranks find the same; the environment knows the rank before there is a process group.
  if (environment::integer({"RANK"}).value_or(0) == 0) logs::warn("accelerate.precision", "{}", text);
}

}  // namespace

const char* to_string(FP8BackendType type) {
  switch (type) {
    case FP8BackendType::NO:
      return "NO";
    case FP8BackendType::TE:
      return "TE";
    case FP8BackendType::MSAMP:
      return "MSAMP";
    case FP8BackendType::AO:
      return "AO";
  }
  return "?";
}

FP8BackendType fp8_backend_from_string(const std::string& text) {
  const std::string name = upper(text);
  for (const auto type : {FP8BackendType::NO, FP8BackendType::TE, FP8BackendType::MSAMP, FP8BackendType::AO})
    if (name == to_string(type)) return type;
  raise<ConfigError>(
      "fp8: the back end is '{}', expected AO, TE, MSAMP or NO; check --fp8_backend or ACCELERATE_FP8_BACKEND", text);
}

AORecipeKwargs resolve(AORecipeKwargs kwargs) {
  if (kwargs.config) {
    const auto take = [](std::optional<bool>& field, bool configured, const char* name) {
      if (field && *field != configured)
        raise<ConfigError>(
            "fp8: AORecipeKwargs has {0} = {1} beside a config with {0} = {2}, expected it in one of them; set "
            "config's {0}",
            name, *field, configured);
      field = configured;
    };
    take(kwargs.pad_inner_dim, kwargs.config->pad_inner_dim, "pad_inner_dim");
    take(kwargs.enable_fsdp_float8_all_gather, kwargs.config->enable_fsdp_float8_all_gather,
         "enable_fsdp_float8_all_gather");
  } else {
    if (!kwargs.pad_inner_dim) kwargs.pad_inner_dim = flag("ACCELERATE_FP8_PAD_INNER_DIM", true);
    if (!kwargs.enable_fsdp_float8_all_gather)
      kwargs.enable_fsdp_float8_all_gather = flag("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER", true);
    kwargs.config = Float8LinearConfig{.enable_fsdp_float8_all_gather = *kwargs.enable_fsdp_float8_all_gather,
                                       .pad_inner_dim = *kwargs.pad_inner_dim};
  }
  const auto& config = *kwargs.config;
  check_choice("AORecipeKwargs::config.recipe", "Float8LinearConfig", config.recipe,
               {"tensorwise", "rowwise", "rowwise_with_gw_hp"});
  if (config.enable_fsdp_float8_all_gather && config.recipe != "tensorwise")
    raise<ConfigError>(
        "fp8: AORecipeKwargs::config has enable_fsdp_float8_all_gather with the recipe {}, expected tensorwise: a "
        "weight has one scale while it travels; set enable_fsdp_float8_all_gather = false",
        config.recipe);
  return kwargs;
}

TERecipeKwargs resolve(TERecipeKwargs kwargs) {
  resolve_delayed(kwargs);
  return kwargs;
}

MSAMPRecipeKwargs resolve(MSAMPRecipeKwargs kwargs) {
  resolve_level(kwargs);
  static std::atomic<bool> said = false;
  warn_once(said,
            "fp8: MS-AMP is deprecated and will be gone with version 2.0 of the reference; use AORecipeKwargs or "
            "TERecipeKwargs (--fp8_backend ao or te)");
  static std::atomic<bool> said_of_level = false;
  if (*kwargs.opt_level == "O2")
    warn_once(said_of_level,
              "fp8: MSAMPRecipeKwargs::opt_level is O2, which does what O1 does: the optimizer's states, which MS-AMP "
              "would keep in 8 bits, stay as the optimizer has them. optim::AdamW8bit keeps them in 8 bits");
  return kwargs;
}

FP8RecipeKwargs resolve(FP8RecipeKwargs kwargs) {
  static std::atomic<bool> said = false;
  warn_once(said,
            "fp8: FP8RecipeKwargs is deprecated and will be gone with version 2.0 of the reference; use "
            "TERecipeKwargs or MSAMPRecipeKwargs");
  if (!kwargs.backend) kwargs.backend = environment::text("ACCELERATE_FP8_BACKEND").value_or("TE");
  kwargs.backend = upper(*kwargs.backend);
  check_choice("FP8RecipeKwargs::backend", "ACCELERATE_FP8_BACKEND", *kwargs.backend, {"MSAMP", "TE"});
  resolve_delayed(kwargs);
  resolve_level(kwargs);
  refuse_without_effect(kwargs);
  return kwargs;
}

KwargsDict to_dict(const AORecipeKwargs& kwargs) {
  return {{"config", kwargs.config ? KwargsValue(kwargs.config->recipe) : KwargsValue(nullptr)},
          {"pad_inner_dim", or_null(kwargs.pad_inner_dim)},
          {"enable_fsdp_float8_all_gather", or_null(kwargs.enable_fsdp_float8_all_gather)}};
}
KwargsDict to_dict(const TERecipeKwargs& kwargs) { return delayed_dict(kwargs); }
KwargsDict to_dict(const MSAMPRecipeKwargs& kwargs) { return {{"opt_level", or_null(kwargs.opt_level)}}; }
KwargsDict to_dict(const FP8RecipeKwargs& kwargs) {
  KwargsDict dict = delayed_dict(kwargs);
  dict["opt_level"] = or_null(kwargs.opt_level);
  dict["backend"] = or_null(kwargs.backend);
  return dict;
}

}  // namespace accelerate
