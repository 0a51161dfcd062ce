#include <algorithm>
#include <charconv>
#include <cmath>

#include "accelerate/config.hpp"
#include "input/json.hpp"
#include "parallel/zero/document.hpp"
#include "parallel/zero/settings_table.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

using json = nlohmann::ordered_json;

template <class... Args> [[noreturn]] void refuse_plugin(fmt::format_string<Args...> text, Args&&... args) {
  raise<ConfigError>("DeepSpeed plugin: {}", fmt::format(text, std::forward<Args>(args)...));
}

json to_node(const DeepSpeedValue& value) {
  return std::visit([](const auto& content) { return json(content); }, value);
}

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> words;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

/// `node` is the configuration's value at `key`.
void fill(json& node, const std::string& key, const DeepSpeedValues& values, std::vector<std::string>* mismatches) {
  const auto value = values.find(key);
  if (node == "auto") {
    if (value == values.end())
      refuse_plugin(
          "'{}' is \"auto\", but there is no value for it; write a value into the DeepSpeed configuration, or give one",
          key);
    node = to_node(value->second);
  } else if (mismatches && !node.is_null() && value != values.end()) {
    // As numbers compare in Python: true is 1.
    const auto number = [](const json& n) { return n.is_boolean() ? json(n.get<bool>() ? 1 : 0) : n; };
    const json given = to_node(value->second);
    if (number(node) != number(given))
      mismatches->push_back(fmt::format("{} is {}, but {} is used", key, show_json(node), show_json(given)));
  }
}

void process(json& section, const std::string& prefix, const DeepSpeedValues& values,
             std::vector<std::string>* mismatches) {
  for (auto& [key, node] : section.items()) {
    if (node.is_object()) process(node, prefix + key + ".", values, mismatches);
    else fill(node, prefix + key, values, mismatches);
  }
}

/// Settings that both the plugin and the configuration have, in the order in which they are filled.
struct Shared {
  const char* key;
  DeepSpeedValue (*get)(const DeepSpeedPlugin&);
  void (*set)(DeepSpeedPlugin&, const DeepSpeedValue&, const char* key);
};

[[noreturn]] void wrong_type(const char* key, const DeepSpeedValue& found, const char* expected) {
  refuse_plugin("the configuration's {} is {}, expected {}", key, show_json(to_node(found)), expected);
}

double number_of(const DeepSpeedValue& value, const char* key) {
  if (const auto* integer = std::get_if<int64_t>(&value)) return static_cast<double>(*integer);
  if (const auto* real = std::get_if<double>(&value)) return *real;
  wrong_type(key, value, "a number or \"auto\"");
}
int64_t integer_of(const DeepSpeedValue& value, const char* key) {
  if (const auto* integer = std::get_if<int64_t>(&value)) return *integer;
  // JSON writers may say 2.0.
  if (const auto* real = std::get_if<double>(&value); real && std::trunc(*real) == *real && std::abs(*real) < 1e15)
    return static_cast<int64_t>(*real);
  wrong_type(key, value, "a whole number or \"auto\"");
}
template <std::optional<std::string> DeepSpeedPlugin::*field> constexpr Shared text_setting(const char* key) {
  return {key, [](const DeepSpeedPlugin& plugin) { return DeepSpeedValue(*(plugin.*field)); },
          [](DeepSpeedPlugin& plugin, const DeepSpeedValue& value, const char* name) {
            if (const auto* text = std::get_if<std::string>(&value)) plugin.*field = *text;
            else wrong_type(name, value, "a text");
          }};
}
template <class Number> DeepSpeedValue auto_or(const std::optional<std::variant<Number, Auto>>& field) {
  if (const auto* number = std::get_if<Number>(&*field)) return *number;
  return "auto";
}

const std::vector<Shared>& shared_settings() {
  static const std::vector<Shared> settings{
      {"gradient_accumulation_steps", [](const DeepSpeedPlugin& p) { return auto_or(p.gradient_accumulation_steps); },
       [](DeepSpeedPlugin& p, const DeepSpeedValue& value, const char* key) {
         p.gradient_accumulation_steps = integer_of(value, key);
       }},
      {"gradient_clipping", [](const DeepSpeedPlugin& p) { return auto_or(p.gradient_clipping); },
       [](DeepSpeedPlugin& p, const DeepSpeedValue& value, const char* key) {
         p.gradient_clipping = number_of(value, key);
       }},
      {"zero_optimization.stage", [](const DeepSpeedPlugin& p) { return DeepSpeedValue(*p.zero_stage); },
       [](DeepSpeedPlugin& p, const DeepSpeedValue& value, const char* key) { p.zero_stage = integer_of(value, key); }},
      text_setting<&DeepSpeedPlugin::offload_optimizer_device>("zero_optimization.offload_optimizer.device"),
      text_setting<&DeepSpeedPlugin::offload_param_device>("zero_optimization.offload_param.device"),
      text_setting<&DeepSpeedPlugin::offload_param_nvme_path>("zero_optimization.offload_param.nvme_path"),
      text_setting<&DeepSpeedPlugin::offload_optimizer_nvme_path>("zero_optimization.offload_optimizer.nvme_path"),
      {"zero_optimization.stage3_gather_16bit_weights_on_model_save",
       [](const DeepSpeedPlugin& p) { return DeepSpeedValue(*p.zero3_save_16bit_model); },
       [](DeepSpeedPlugin& p, const DeepSpeedValue& value, const char* key) {
         if (const auto* flag = std::get_if<bool>(&value)) p.zero3_save_16bit_model = *flag;
         else wrong_type(key, value, "true, false or \"auto\"");
       }}};
  return settings;
}

void fields_from_environment(DeepSpeedPlugin& plugin) {
  const auto or_auto = [](const char* name, auto read) -> std::variant<decltype(read(name)), Auto> {
    const auto text = environment::text(name);
    if (!text || *text == "auto") return Auto{};
    return read(name);
  };
  if (!plugin.gradient_accumulation_steps)
    plugin.gradient_accumulation_steps = or_auto("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
                                                 [](const char* name) { return environment::integer({name}).value(); });
  if (!plugin.gradient_clipping)
    plugin.gradient_clipping =
        or_auto("ACCELERATE_GRADIENT_CLIPPING", [](const char* name) { return environment::number(name).value(); });
  if (!plugin.zero_stage) plugin.zero_stage = environment::integer({"ACCELERATE_DEEPSPEED_ZERO_STAGE"}).value_or(2);
  const auto or_none = [](std::optional<std::string>& field, const char* name) {
    if (!field) field = environment::text(name).value_or("none");
  };
  or_none(plugin.offload_optimizer_device, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE");
  or_none(plugin.offload_param_device, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE");
  or_none(plugin.offload_optimizer_nvme_path, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH");
  or_none(plugin.offload_param_nvme_path, "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH");
  if (!plugin.zero3_save_16bit_model)
    plugin.zero3_save_16bit_model = environment::flag("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL").value_or(false);
  if (!plugin.transformer_moe_cls_names)
    if (const auto names = environment::text("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"))
      plugin.transformer_moe_cls_names = split_at_commas(*names);
  if (!plugin.enable_msamp) plugin.enable_msamp = environment::text("ACCELERATE_FP8_BACKEND") == "MSAMP";
  if (!plugin.msamp_opt_level) plugin.msamp_opt_level = environment::text("ACCELERATE_FP8_OPT_LEVEL").value_or("O1");
  if (!plugin.as_of_version)
    plugin.as_of_version = environment::text("ACCELERATE_DEEPSPEED_AS_OF_VERSION").value_or("0.19.8");
  if (!plugin.step_in_backward)
    plugin.step_in_backward = environment::flag("ACCELERATE_DEEPSPEED_STEP_IN_BACKWARD").value_or(false);
  if (!plugin.step_at_once)
    plugin.step_at_once = environment::flag("ACCELERATE_DEEPSPEED_STEP_AT_ONCE").value_or(false);
  if (!plugin.hf_ds_config)
    if (const auto source = environment::text("ACCELERATE_DEEPSPEED_CONFIG_FILE"); source && *source != "none")
      plugin.hf_ds_config.emplace(*source);
}

/// With a configuration of DeepSpeed's own, `accelerate config` must not have asked for the same settings.
void check_config_fields() {
  static const std::vector<std::string> overruled{
      "gradient_accumulation_steps", "gradient_clipping",      "zero_stage",
      "offload_optimizer_device",    "offload_param_device",   "offload_param_nvme_path",
      "offload_optimizer_nvme_path", "zero3_save_16bit_model", "mixed_precision"};
  std::vector<std::string> found;
  for (const auto& field : split_at_commas(environment::text("ACCELERATE_CONFIG_DS_FIELDS").value_or("")))
    if (std::find(overruled.begin(), overruled.end(), field) != overruled.end()) found.push_back(field);
  if (found.empty()) return;
  refuse_plugin(
      "the config file of `accelerate launch` has a DeepSpeed configuration and beside it {}, which that would "
      "overrule (as it does {}). Remove them from the config file, or answer `accelerate config` anew, and set them in "
      "DeepSpeed's file",
      fmt::join(found, ", "), fmt::join(overruled, ", "));
}

DeepSpeedConfig config_of_fields(const DeepSpeedPlugin& plugin) {
  DeepSpeedConfig config("{}");
  config.document().of_fields = true;
  config.set_value("train_batch_size", "auto");
  config.set_value("train_micro_batch_size_per_gpu", "auto");
  config.set_value("gradient_accumulation_steps", auto_or(plugin.gradient_accumulation_steps));
  config.set_value("zero_optimization.stage", *plugin.zero_stage);
  const auto offload = [&](const std::string& section, const std::string& device, const std::string& path) {
    config.set_value(section + ".device", device);
    config.set_value(section + ".nvme_path", device == "nvme" ? DeepSpeedValue(path) : DeepSpeedValue(nullptr));
  };
  offload("zero_optimization.offload_optimizer", *plugin.offload_optimizer_device, *plugin.offload_optimizer_nvme_path);
  offload("zero_optimization.offload_param", *plugin.offload_param_device, *plugin.offload_param_nvme_path);
  config.set_value("zero_optimization.stage3_gather_16bit_weights_on_model_save", *plugin.zero3_save_16bit_model);
  const auto* clipping = std::get_if<double>(&*plugin.gradient_clipping);
  if (!clipping || *clipping != 0) config.set_value("gradient_clipping", auto_or(plugin.gradient_clipping));
  return config;
}

void check_values(const DeepSpeedPlugin& plugin) {
  zero::is_before(*plugin.as_of_version, "0.19.8");  // it is a version
  if (*plugin.zero_stage < 0 || *plugin.zero_stage > 3)
    refuse_plugin("zero_stage is {}, expected 0, 1, 2 or 3", *plugin.zero_stage);
  for (const auto& [name, device] : {std::pair("offload_optimizer_device", &*plugin.offload_optimizer_device),
                                     std::pair("offload_param_device", &*plugin.offload_param_device)}) {
    if (*device == "none" || *device == "cpu" || *device == "nvme") continue;
    const auto nearest = nearest_name(*device, {"none", "cpu", "nvme"});
    refuse_plugin("{} is '{}', expected none, cpu or nvme{}", name, *device,
                  nearest ? fmt::format("; did you mean {}?", *nearest) : "");
  }
}

}  // namespace

DeepSpeedConfig& DeepSpeedPlugin::deepspeed_config() {
  return const_cast<DeepSpeedConfig&>(std::as_const(*this).deepspeed_config());
}
const DeepSpeedConfig& DeepSpeedPlugin::deepspeed_config() const {
  if (!hf_ds_config)
    refuse_plugin("its configuration is not there yet, expected a plugin that parallel::resolve returned");
  return *hf_ds_config;
}

void DeepSpeedPlugin::fill_match(const std::string& key, const DeepSpeedValues& values,
                                 std::vector<std::string>* mismatches) {
  auto& config = deepspeed_config();
  // A key that is missing has no "auto" to fill; one whose section is none is an error.
  if (!config.contains(key)) return;
  json* node = &config.document().json;
  for (size_t begin = 0; begin <= key.size();) {
    const size_t end = std::min(key.find('.', begin), key.size());
    node = &(*node)[key.substr(begin, end - begin)];
    begin = end + 1;
  }
  fill(*node, key, values, mismatches);
}

void DeepSpeedPlugin::deepspeed_config_process(const DeepSpeedValues& values, bool must_match) {
  std::vector<std::string> mismatches;
  process(deepspeed_config().document().json, "", values, must_match ? &mismatches : nullptr);
  if (mismatches.empty()) return;
  refuse_plugin(
      "the DeepSpeed configuration says something else than the program:\n  {}\nCorrect them, or write \"auto\" into "
      "the configuration",
      fmt::join(mismatches, "\n  "));
}

void DeepSpeedPlugin::set_mixed_precision(std::string_view mixed_precision) {
  if (mixed_precision != "no" && mixed_precision != "fp16" && mixed_precision != "bf16" && mixed_precision != "fp8")
    refuse_plugin("mixed_precision is '{}', expected no, fp16, bf16 or fp8", mixed_precision);
  auto& config = deepspeed_config();
  const bool fp16 = mixed_precision == "fp16",
             bf16 =
                 mixed_precision == "bf16" || mixed_precision == "fp8";  // 8-bit products are embedded in bf16 training
  const char* other = fp16 ? "bf16" : "fp16";
  if (fp16 || bf16) {
    const auto enabled = config.contains(other) ? config.get_value(std::string(other) + ".enabled") : std::nullopt;
    std::string text = enabled && std::holds_alternative<std::string>(*enabled) ? std::get<std::string>(*enabled) : "";
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
    if (text == "true" || (enabled && *enabled == DeepSpeedValue(true)))
      refuse_plugin(
          "mixed_precision is {0}, but the DeepSpeed configuration enables {1}; set {1}.enabled to \"auto\" there, or "
          "use --mixed_precision {1}",
          mixed_precision, other);
  }
  if (fp16 && !config.contains("fp16")) {
    config.set_value("fp16.enabled", true);
    config.set_value("fp16.auto_cast", true);
  }
  if (bf16 && !config.contains("bf16")) config.set_value("bf16.enabled", true);
  if (mixed_precision == "fp8" && enable_msamp.value_or(false) && !config.contains("msamp")) {
    config.set_value("msamp.enabled", true);
    config.set_value("msamp.opt_level", msamp_opt_level.value_or("O1"));
  }
  for (const char* type : {"fp16", "bf16"})
    if (!config.contains(type)) config.set_value(std::string(type) + ".enabled", false);
  fill_match("fp16.enabled", {{"fp16.enabled", fp16}});
  fill_match("bf16.enabled", {{"bf16.enabled", bf16}});
}

namespace parallel {

bool deepspeed_requested() { return environment::flag("ACCELERATE_USE_DEEPSPEED").value_or(false); }

DeepSpeedPlugin resolve(DeepSpeedPlugin plugin) {
  fields_from_environment(plugin);
  if (plugin.hf_ds_config) {
    auto& config = *plugin.hf_ds_config;
    if (!config.contains("gradient_accumulation_steps")) config.set_value("gradient_accumulation_steps", int64_t{1});
    if (!config.contains("zero_optimization"))
      refuse_plugin(
          "the DeepSpeed configuration has no section zero_optimization, expected one with a stage, such as "
          "{{\"zero_optimization\": {{\"stage\": 2}}}}");
    check_config_fields();
    for (const auto& setting : shared_settings()) plugin.fill_match(setting.key, {{setting.key, setting.get(plugin)}});
    for (const auto& setting : shared_settings())
      if (const auto value = config.get_value(setting.key); value && !config.is_auto(setting.key))
        setting.set(plugin, *value, setting.key);
  }
  check_values(plugin);
  if (!plugin.hf_ds_config) plugin.hf_ds_config = config_of_fields(plugin);
  auto& config = *plugin.hf_ds_config;
  // Else DeepSpeed prints between the program's own lines.
  const DeepSpeedValue never = std::numeric_limits<double>::infinity();
  const auto steps_per_print = config.get_value("steps_per_print");
  if (steps_per_print && *steps_per_print != never) config.document().gave_steps_per_print = true;
  config.set_value("steps_per_print", never);

  const auto init =
      plugin.zero3_init_flag ? plugin.zero3_init_flag : environment::flag("ACCELERATE_DEEPSPEED_ZERO3_INIT");
  config.document().asked_for_init = init.value_or(false) && config.is_zero3();
  plugin.zero3_init_flag = init.value_or(config.is_zero3());
  if (*plugin.zero3_init_flag && !config.is_zero3()) {
    // All ranks find the same; once is enough.
    if (environment::integer({"RANK"}).value_or(0) == 0)
      logs::warn("accelerate.parallel",
                 "DeepSpeed plugin: zero3_init_flag has no effect below stage 3: it is now false.");
    plugin.zero3_init_flag = false;
  }
  if (*plugin.enable_msamp && !config.contains("msamp")) {
    if (*plugin.zero_stage == 3)
      refuse_plugin("enable_msamp is true, but MS-AMP does not have zero_stage 3; use 0, 1 or 2");
    if (*plugin.msamp_opt_level != "O1" && *plugin.msamp_opt_level != "O2")
      refuse_plugin("msamp_opt_level is '{}', expected O1 or O2", *plugin.msamp_opt_level);
    config.set_value("msamp.enabled", true);
    config.set_value("msamp.opt_level", *plugin.msamp_opt_level);
  }
  return plugin;
}

}  // namespace parallel
}  // namespace accelerate
