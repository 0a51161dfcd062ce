// Handlers of fp8: what their fields are after the environment and the defaults.
#include "accelerate/precision/fp8_kwargs.hpp"
#include "environment.hpp"

namespace conformance::fp8_kwargs_cases {
namespace {

using namespace accelerate;

template <class T> void take(std::optional<T>& field, const json& kwargs, const char* name) {
  if (kwargs.contains(name)) field = kwargs[name].get<T>();
}

template <class Kwargs> Kwargs delayed(const json& given) {
  Kwargs kwargs;
  take(kwargs.use_autocast_during_eval, given, "use_autocast_during_eval");
  take(kwargs.margin, given, "margin");
  take(kwargs.interval, given, "interval");
  take(kwargs.fp8_format, given, "fp8_format");
  take(kwargs.amax_history_len, given, "amax_history_len");
  take(kwargs.amax_compute_algo, given, "amax_compute_algo");
  take(kwargs.override_linear_precision, given, "override_linear_precision");
  take(kwargs.use_mxfp8_block_scaling, given, "use_mxfp8_block_scaling");
  return kwargs;
}

template <class Kwargs> json fields(const Kwargs& kwargs) {
  json result = json::object();
  for (const auto& [name, value] : to_dict(accelerate::resolve(kwargs)))
    std::visit([&result, &name](const auto& content) { result[name] = content; }, value);
  return result;
}

json found(const std::string& handler, const json& given) {
  if (handler == "TERecipeKwargs") return fields(delayed<TERecipeKwargs>(given));
  if (handler == "FP8RecipeKwargs") {
    auto kwargs = delayed<FP8RecipeKwargs>(given);
    take(kwargs.backend, given, "backend");
    json result = fields(kwargs);
    result["opt_level"] = nullptr;  // the reference's constructor forgets it
    return result;
  }
  if (handler == "MSAMPRecipeKwargs") {
    MSAMPRecipeKwargs kwargs;
    take(kwargs.opt_level, given, "opt_level");
    return fields(kwargs);
  }
  if (handler != "AORecipeKwargs") throw std::runtime_error("no such handler in the runner: " + handler);
  AORecipeKwargs kwargs;
  take(kwargs.pad_inner_dim, given, "pad_inner_dim");
  take(kwargs.enable_fsdp_float8_all_gather, given, "enable_fsdp_float8_all_gather");
  json result = fields(kwargs);
  const auto config = *accelerate::resolve(kwargs).config;
  result["config"] = {{"pad_inner_dim", config.pad_inner_dim},
                      {"enable_fsdp_float8_all_gather", config.enable_fsdp_float8_all_gather}};
  return result;
}

void run(const json& file, Report& report) {
  for (const json& row : file.at("cases")) {
    const Environment environment(row[1]);
    const json mine = outcome([&] { return found(row[0].get<std::string>(), row[2]); });
    const bool same = row[3].contains("error") ? mine.is_null() : mine == row[3];
    report.check(same, [&] { return row.dump() + "\n    found " + mine.dump(); });
  }
}

const Registration registration("fp8_kwargs", {run});

}  // namespace
}  // namespace conformance::fp8_kwargs_cases
