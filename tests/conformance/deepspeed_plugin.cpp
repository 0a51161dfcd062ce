// DeepSpeedPlugin: what environment, settings and DeepSpeed's own configuration become; mixed precision; "auto".
// The texts of errors are Python's: informative.
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "environment.hpp"

namespace conformance::deepspeed_plugin_cases {
namespace {

using accelerate::Auto;
using accelerate::DeepSpeedPlugin;

template <class Number> json rendered(const std::variant<Number, Auto>& value) {
  if (const auto* number = std::get_if<Number>(&value)) return *number;
  return "auto";
}

/// The generator wrote Python's infinity as "inf".
json config_of(const DeepSpeedPlugin& plugin) {
  auto config = plugin.deepspeed_config();
  if (config.get_value("steps_per_print") == accelerate::DeepSpeedValue(std::numeric_limits<double>::infinity()))
    config.set_value("steps_per_print", "inf");
  return json::parse(config.to_json());
}

json fields_of(const DeepSpeedPlugin& plugin) {
  return {{"deepspeed_config", config_of(plugin)},
          {"zero_stage", plugin.zero_stage.value()},
          {"gradient_accumulation_steps", rendered(plugin.gradient_accumulation_steps.value())},
          {"gradient_clipping", rendered(plugin.gradient_clipping.value())},
          {"offload_optimizer_device", plugin.offload_optimizer_device.value()},
          {"offload_param_device", plugin.offload_param_device.value()},
          {"zero3_init_flag", plugin.zero3_init_flag.value()},
          {"zero3_save_16bit_model", plugin.zero3_save_16bit_model.value()}};
}

DeepSpeedPlugin plugin_of(const json& kwargs) {
  DeepSpeedPlugin plugin;
  for (const auto& [name, value] : kwargs.items()) {
    if (name == "hf_ds_config")
      plugin.hf_ds_config.emplace(value.is_string() ? value.get<std::string>() : value.dump());
    else if (name == "zero_stage") plugin.zero_stage = value.get<int64_t>();
    else if (name == "gradient_accumulation_steps") plugin.gradient_accumulation_steps = value.get<int64_t>();
    else if (name == "gradient_clipping") plugin.gradient_clipping = value.get<double>();
    else if (name == "offload_optimizer_device") plugin.offload_optimizer_device = value.get<std::string>();
    else if (name == "offload_param_device") plugin.offload_param_device = value.get<std::string>();
    else if (name == "zero3_init_flag") plugin.zero3_init_flag = value.get<bool>();
    else if (name == "zero3_save_16bit_model") plugin.zero3_save_16bit_model = value.get<bool>();
    else throw std::runtime_error("no such field in the runner: " + name);
  }
  return plugin;
}

accelerate::DeepSpeedValue value_of(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number()) return value.get<double>();
  return value.get<std::string>();
}

/// The configuration of the auto_fill rows, which do not repeat it: the third case with hf_ds_config, with the numbers'
/// types as there.
json zero3_config(const json& file) {
  for (const json& row : file.at("cases"))
    if (row[1].contains("hf_ds_config") && row[1]["hf_ds_config"].contains("optimizer") &&
        row[1]["hf_ds_config"]["zero_optimization"]["stage"] == 3)
      return row[1]["hf_ds_config"];
  throw std::runtime_error("no case holds the configuration that the auto_fill rows start from");
}

void run(const json& file, Report& report) {
  const auto row_passes = [&](const json& row, const json& expected, const json& found) {
    report.check(expected.contains("error") ? found.is_null() : found == expected,
                 [&] { return row.dump() + "\n    found " + found.dump(); });
  };
  for (const json& row : file.at("cases")) {
    const Environment environment(row[0]);
    row_passes(row, row[2], outcome([&] { return fields_of(accelerate::parallel::resolve(plugin_of(row[1]))); }));
  }
  for (const json& row : file.at("mixed_precision"))
    row_passes(row, row[2], outcome([&] {
                 auto plugin = accelerate::parallel::resolve(plugin_of({{"hf_ds_config", row[1]}}));
                 plugin.set_mixed_precision(row[0].get<std::string>());
                 const json config = config_of(plugin);
                 return json{{"fp16", config.at("fp16")}, {"bf16", config.at("bf16")}};
               }));
  for (const json& row : file.at("auto_fill"))
    row_passes(row, row[1], outcome([&] {
                 auto plugin = accelerate::parallel::resolve(plugin_of({{"hf_ds_config", zero3_config(file)}}));
                 accelerate::DeepSpeedValues values{{"fp16.enabled", false}, {"bf16.enabled", true}};
                 for (const auto& [key, value] : row[0].items()) values[key] = value_of(value);
                 plugin.deepspeed_config_process(values, /*must_match=*/false);
                 return config_of(plugin);
               }));
  if (!file.contains("must_match")) return;
  for (const json& row : file["must_match"])
    row_passes(row, row[2], outcome([&] {
                 auto plugin = accelerate::parallel::resolve(plugin_of({{"hf_ds_config", row[0]}}));
                 accelerate::DeepSpeedValues values;
                 for (const auto& [key, value] : row[1].items()) values[key] = value_of(value);
                 plugin.deepspeed_config_process(values);
                 return config_of(plugin);
               }));
}

const Registration registration("deepspeed_plugin", {run}),
    more("deepspeed_plugin_more", {run});  // made by generators/plugins.py

}  // namespace
}  // namespace conformance::deepspeed_plugin_cases
