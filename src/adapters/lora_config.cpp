#include "adapters/lora_config.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <set>
#include <string_view>

#include "input/json.hpp"
#include "input/read_file.hpp"
#include "input/regular_expression.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate::detail {
namespace {

using Json = nlohmann::ordered_json;  // of the patterns the first that fits counts
template <class T> using Patterns = std::vector<std::pair<std::string, T>>;

constexpr size_t kMostPatternBytes = 1000;

/// As PEFT looks for them.
RegularExpression expression_of(const std::string& pattern) { return RegularExpression("(.*\\.)?(" + pattern + ")"); }

template <class T> T by_pattern(const Patterns<T>& patterns, const std::string& path, T otherwise) {
  for (const auto& [pattern, value] : patterns)
    if (expression_of(pattern).matches(path)) return value;
  return otherwise;
}

template <class T> void check_patterns(const char* field, const Patterns<T>& patterns) {
  std::set<std::string_view> seen;
  for (const auto& [pattern, value] : patterns) {
    if (!seen.insert(pattern).second)
      raise<ConfigError>("LoraConfig: found '{}' twice in {}, expected it once: the first would count", pattern, field);
    if (pattern.size() > kMostPatternBytes)
      raise<ConfigError>("LoraConfig: a pattern in {} has {} bytes, expected at most {}; name modules by their ends",
                         field, pattern.size(), kMostPatternBytes);
    // Python's re has no classes by name: [[:alpha:]] is a set of characters and a ] there.
    if (pattern.find("[:") != std::string::npos)
      raise<ConfigError>(
          "LoraConfig: found [: in '{}' of {}, which means something else in Python, expected classes "
          "like \\w, or sets of characters",
          pattern, field);
    try {
      expression_of(pattern);
    } catch (const ConfigError& error) {
      raise<ConfigError>("LoraConfig: '{}' in {} is no regular expression: {}", pattern, field, error.what());
    }
    if (!(value > 0))
      raise<ConfigError>("LoraConfig: found {} for '{}' in {}, expected more than 0", value, pattern, field);
  }
}

/// Fields of PEFT's config that change what an adapter computes, beside those that LoraConfig has. Each is there with
/// the value that leaves it off; an empty list, dict or text, false and null mean so, too.
constexpr std::array kOff{
    "use_dora",          "target_parameters", "lora_bias",  "use_qalora",   "alora_invocation_tokens",
    "layer_replication", "megatron_config",   "use_bdlora", "arrow_config", "kasa_config",
    "velora_config",     "monteclora_config"};
constexpr std::array kNull{"auto_mapping",        "revision",      "eva_config", "corda_config", "lora_ga_config",
                           "layers_to_transform", "layers_pattern"};

/// Other fields that PEFT writes, about training or about the author: they are read here.
constexpr std::array kOthers{"alpha_pattern",
                             "base_model_name_or_path",
                             "bias",
                             "ensure_weight_tying",
                             "exclude_modules",
                             "fan_in_fan_out",
                             "inference_mode",
                             "init_lora_weights",
                             "loftq_config",
                             "lora_alpha",
                             "lora_dropout",
                             "megatron_core",
                             "modules_to_save",
                             "peft_type",
                             "peft_version",
                             "qalora_group_size",
                             "r",
                             "rank_pattern",
                             "runtime_config",
                             "target_modules",
                             "task_type",
                             "trainable_token_indices",
                             "use_rslora"};

bool is_off(const Json& value) {
  return value.is_null() || value == false || value == "" || (value.is_structured() && value.empty());
}

/// PEFT, too, goes on without fields of a newer one, and says so.
void warn_of_unknown(const Json& fields, const std::string& where) {
  const auto is_one_of = [](const auto& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (const auto& [name, value] : fields.items())
    if (!is_off(value) && !is_one_of(kOff, name) && !is_one_of(kNull, name) && !is_one_of(kOthers, name))
      logs::warn("accelerate.adapters",
                 "{}: found {} {}, a field that is not known here, as of a newer PEFT; the adapter is loaded without "
                 "it. If it changes what an adapter computes, results differ from PEFT's",
                 where, show_json(Json(name)), show_json(value));
}

class LoraConfigReader {
 public:
  LoraConfigReader(const Json& fields, std::string where) : fields_(fields), where_(std::move(where)) {}

  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("{}: {}", where_, fmt::format(what, std::forward<Args>(args)...));
  }
  Json at(const char* name) const {
    const auto found = fields_.find(name);
    return found == fields_.end() ? Json() : *found;
  }
  double number(const char* name, double otherwise) const {
    const auto value = at(name);
    if (value.is_null()) return otherwise;
    if (!value.is_number()) fail("found {} at '{}', expected a number", show_json(value), name);
    return value.get<double>();
  }
  int64_t whole(const Json& value, const std::string& name) const {
    const auto number = whole_number(value);
    if (!number) fail("found {} at '{}', expected a whole number", show_json(value), name);
    return *number;
  }
  bool truth(const char* name) const {
    const auto value = at(name);
    if (!value.is_null() && !value.is_boolean())
      fail("found {} at '{}', expected true or false", show_json(value), name);
    return value == true;
  }
  std::string text(const char* name) const {
    const auto value = at(name);
    if (value.is_null()) return {};
    if (!value.is_string()) fail("found {} at '{}', expected a text", show_json(value), name);
    return value.get<std::string>();
  }
  std::vector<std::string> texts(const char* name) const {
    const auto value = at(name);
    std::vector<std::string> result;
    if (value.is_null()) return result;
    if (!value.is_array()) fail("found {} at '{}', expected a list of names", show_json(value), name);
    for (const auto& item : value) {
      if (!item.is_string()) fail("found {} in '{}', expected a name", show_json(item), name);
      result.push_back(item.get<std::string>());
    }
    return result;
  }
  /// A field that may be one value or a list of them.
  template <class Get> void each(const char* name, Get&& get) const {
    const auto value = at(name);
    if (!value.is_array()) return value.is_null() ? void() : get(value);
    for (const auto& item : value) get(item);
  }
  template <class T, class Get> Patterns<T> patterns(const char* name, Get&& get) const {
    const auto value = at(name);
    Patterns<T> result;
    if (value.is_null()) return result;
    if (!value.is_object()) fail("found {} at '{}', expected an object", show_json(value), name);
    for (const auto& [pattern, item] : value.items()) result.emplace_back(pattern, get(item));
    return result;
  }

 private:
  const Json& fields_;
  std::string where_;
};

/// The parts of a path between its dots.
std::vector<std::string_view> parts_of(std::string_view path) {
  std::vector<std::string_view> parts;
  for (size_t end = 0; end != std::string_view::npos; path.remove_prefix(std::min(path.size(), end + 1)))
    parts.push_back(path.substr(0, end = path.find('.')));
  return parts;
}

std::optional<int64_t> number_in(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty() || text.front() == '-' || error != std::errc() || end != text.data() + text.size()) return {};
  return number;
}

/// The first number that stands after a part called `list`, or, without one, after two parts, and is not the last: what
/// PEFT's regular expressions find.
std::optional<int64_t> layer_of(const std::vector<std::string_view>& parts, const std::string& list) {
  for (size_t i = list.empty() ? 2 : 1; i + 1 < parts.size(); ++i)
    if (list.empty() || parts[i - 1] == list)
      if (const auto number = number_in(parts[i])) return number;
  return {};
}

bool is_name(const std::string& text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

/// layers_to_transform and layers_pattern, which only choose from target_modules by name.
void read_layers(const LoraConfigReader& reader, LoadedConfig& result) {
  const auto layers = reader.at("layers_to_transform"), lists = reader.at("layers_pattern");
  const bool by_layer = !layers.is_null() && !(layers.is_array() && layers.empty()), by_list = !is_off(lists);
  if (by_list && layers.is_null())
    reader.fail("found layers_pattern {} without layers_to_transform, expected both, as in PEFT", show_json(lists));
  if (!by_layer) return;
  if (reader.at("target_modules").is_string())
    reader.fail("found layers_to_transform {} with target_modules {}, expected a list of names with it, as in PEFT",
                show_json(layers), show_json(reader.at("target_modules")));
  result.layers.emplace();
  reader.each("layers_to_transform",
              [&](const Json& item) { result.layers->push_back(reader.whole(item, "layers_to_transform")); });
  if (!by_list) return;
  reader.each("layers_pattern", [&](const Json& item) {
    if (!item.is_string() || !is_name(item.get<std::string>()))
      reader.fail(
          "found {} in 'layers_pattern', expected the name of a list of layers (\"layers\", \"h\"): other patterns are "
          "not offered here",
          show_json(item));
    result.layer_lists.push_back(item.get<std::string>());
  });
}

/// A list is of the model's embeddings.
void read_tokens(const LoraConfigReader& reader, LoraConfig& config) {
  const auto value = reader.at("trainable_token_indices");
  if (is_off(value)) return;
  const auto add = [&](const std::string& name, const Json& list) {
    auto& indices = config.trainable_token_indices.emplace_back(name, std::vector<int64_t>()).second;
    if (!list.is_array()) reader.fail("found {} in 'trainable_token_indices', expected a list of ids", show_json(list));
    for (const auto& item : list) indices.push_back(reader.whole(item, "trainable_token_indices"));
  };
  if (!value.is_object()) return add("", value);
  for (const auto& [name, list] : value.items()) add(name, list);
}

}  // namespace

bool LoadedConfig::leaves_out(const std::string& path) const {
  if (!layers || std::find(named.begin(), named.end(), path) != named.end()) return false;
  const auto parts = parts_of(path);
  auto layer = layer_lists.empty() ? layer_of(parts, "") : std::nullopt;
  for (size_t i = 0; !layer && i < layer_lists.size(); ++i) layer = layer_of(parts, layer_lists[i]);
  return !layer || std::find(layers->begin(), layers->end(), *layer) == layers->end();
}

void check(const LoraConfig& config) {
  if (config.bias != "none" && config.bias != "all" && config.bias != "lora_only")
    raise<ConfigError>("LoraConfig: found bias '{}', expected none, all or lora_only", config.bias);
  if (config.r <= 0) raise<ConfigError>("LoraConfig: found r {}, expected at least 1", config.r);
  if (!(config.lora_alpha > 0) || !std::isfinite(config.lora_alpha))
    raise<ConfigError>("LoraConfig: found lora_alpha {}, expected more than 0", config.lora_alpha);
  if (!(config.lora_dropout >= 0 && config.lora_dropout < 1))
    raise<ConfigError>("LoraConfig: found lora_dropout {}, expected at least 0 and less than 1", config.lora_dropout);
  check_patterns("rank_pattern", config.rank_pattern);
  check_patterns("alpha_pattern", config.alpha_pattern);
}

std::vector<std::string> saved_modules(const LoraConfig& config) {
  auto names = config.modules_to_save;
  if (config.task_type == "SEQ_CLS" || config.task_type == "TOKEN_CLS")
    for (const char* head : {"classifier", "score"})
      if (std::find(names.begin(), names.end(), head) == names.end()) names.emplace_back(head);
  return names;
}

bool is_saved(const std::vector<std::string>& modules, std::string_view path) {
  for (; !path.empty(); path = path.substr(0, path.rfind('.') == path.npos ? 0 : path.rfind('.')))
    if (std::any_of(modules.begin(), modules.end(), [&](const std::string& name) { return path.ends_with(name); }))
      return true;
  return false;
}

bool is_listed(const std::vector<std::string>& modules, const std::string& path) {
  return std::any_of(modules.begin(), modules.end(),
                     [&](const std::string& name) { return path == name || path.ends_with("." + name); });
}

int64_t rank_of(const LoraConfig& config, const std::string& path) {
  return by_pattern(config.rank_pattern, path, config.r);
}
double alpha_of(const LoraConfig& config, const std::string& path) {
  return by_pattern(config.alpha_pattern, path, config.lora_alpha);
}

std::string to_json(const LoraConfig& config, bool transposed) {
  Json fields;
  const auto text = [](const std::string& value) { return value.empty() ? Json() : Json(value); };
  const auto list = [](const std::vector<std::string>& values) { return values.empty() ? Json() : Json(values); };
  const auto alpha = [](double value) {
    return value == std::floor(value) && std::abs(value) < 1e15 ? Json(static_cast<int64_t>(value)) : Json(value);
  };
  for (const char* name : kNull) fields[name] = nullptr;
  for (const char* name : kOff) fields[name] = nullptr;
  for (const char* name : {"use_dora", "lora_bias", "use_qalora"}) fields[name] = false;
  fields["peft_type"] = "LORA";
  fields["task_type"] = text(config.task_type);
  fields["base_model_name_or_path"] = text(config.base_model_name_or_path);
  fields["inference_mode"] = true;
  fields["r"] = config.r;
  fields["lora_alpha"] = alpha(config.lora_alpha);
  fields["lora_dropout"] = config.lora_dropout;
  fields["target_modules"] = config.target_modules == std::vector<std::string>{"all-linear"}
                                 ? Json("all-linear")
                                 : list(config.target_modules);
  fields["exclude_modules"] = list(config.exclude_modules);
  Json::object_t ranks, alphas;  // appended to: each is there once
  for (const auto& [pattern, value] : config.rank_pattern) ranks.emplace_back(pattern, value);
  for (const auto& [pattern, value] : config.alpha_pattern) alphas.emplace_back(pattern, alpha(value));
  fields["rank_pattern"] = std::move(ranks);
  fields["alpha_pattern"] = std::move(alphas);
  fields["use_rslora"] = config.use_rslora;
  fields["fan_in_fan_out"] = transposed;
  fields["bias"] = config.bias;
  fields["modules_to_save"] = list(saved_modules(config));
  if (const auto& tokens = config.trainable_token_indices; tokens.size() == 1 && tokens.front().first.empty()) {
    fields["trainable_token_indices"] = tokens.front().second;
  } else {
    fields["trainable_token_indices"] = nullptr;
    for (const auto& [name, indices] : tokens) fields["trainable_token_indices"][name] = indices;
  }
  fields["init_lora_weights"] = config.init_lora_weights == LoraInit::gaussian
                                    ? Json("gaussian")
                                    : Json(config.init_lora_weights == LoraInit::kaiming);
  fields["loftq_config"] = Json::object();
  std::vector<std::string> names;
  for (const auto& [name, value] : fields.items()) names.push_back(name);
  std::sort(names.begin(), names.end());
  Json sorted;
  for (const auto& name : names) sorted[name] = fields[name];
  return sorted.dump(2);
}

LoadedConfig read_config(const std::filesystem::path& file) {
  std::string text;
  const auto where = "load_adapter: '" + file.string() + "'";
  if (const auto problem = read_file(file, kMostSettingsBytes, text); !problem.empty())
    raise<CheckpointError>("{}: {}; expected a folder that PEFT's save_pretrained or LoraAdapter::save wrote", where,
                           problem);
  std::string problem;
  const auto fields = parse_json<Json>(text, &problem);
  if (fields.is_discarded()) raise<CheckpointError>("{} {}", where, problem);
  const LoraConfigReader reader(fields, where);
  if (!fields.is_object()) reader.fail("found {}, expected an object", show_json(fields));
  if (const auto type = reader.text("peft_type"); type != "LORA")
    reader.fail("found peft_type {}, expected \"LORA\", the one kind of adapter that is offered",
                show_json(reader.at("peft_type")));
  for (const char* name : kOff)
    if (!is_off(reader.at(name)))
      reader.fail("found '{}' {}, expected it to be off: that is not offered here", name, show_json(reader.at(name)));
  LoadedConfig result;
  LoraConfig& config = result.config;
  if (const auto bias = reader.text("bias"); !bias.empty()) config.bias = bias;
  config.modules_to_save = reader.texts("modules_to_save");
  read_tokens(reader, config);
  if (const auto init = reader.at("init_lora_weights"); init == "gaussian")
    config.init_lora_weights = LoraInit::gaussian;
  else if (init == false) config.init_lora_weights = LoraInit::random;
  // These begin with other values, too, and leave the base model as it is.
  else if (!init.is_null() && init != true && init != "eva" && init != "orthogonal")
    reader.fail(
        "found init_lora_weights {}, expected true, false, \"gaussian\", \"eva\" or \"orthogonal\": others change the "
        "base model (PiSSA, OLoRA, CorDA, LoftQ), so that the file alone says too little. Convert it by PEFT's "
        "save_pretrained(path_initial_model_for_weight_conversion=…)",
        show_json(init));
  if (const auto rank = reader.at("r"); !rank.is_null()) config.r = reader.whole(rank, "r");
  config.lora_alpha = reader.number("lora_alpha", config.lora_alpha);
  config.lora_dropout = reader.number("lora_dropout", 0);
  config.use_rslora = reader.truth("use_rslora");
  config.fan_in_fan_out = reader.truth("fan_in_fan_out");
  config.rank_pattern =
      reader.patterns<int64_t>("rank_pattern", [&](const Json& value) { return reader.whole(value, "rank_pattern"); });
  config.alpha_pattern = reader.patterns<double>("alpha_pattern", [&](const Json& value) {
    if (!value.is_number()) reader.fail("found {} in 'alpha_pattern', expected a number", show_json(value));
    return value.get<double>();
  });
  read_layers(reader, result);
  if (result.layers) result.named = reader.texts("target_modules");
  result.whole_names =
      reader.at("target_modules").is_string() || reader.at("exclude_modules").is_string() || result.layers.has_value();
  if (!result.whole_names) {
    config.target_modules = reader.texts("target_modules");
    config.exclude_modules = reader.texts("exclude_modules");
  }
  config.base_model_name_or_path = reader.text("base_model_name_or_path");
  config.task_type = reader.text("task_type");
  try {
    check(config);
  } catch (const ConfigError& error) {
    reader.fail("{}", error.what());
  }
  warn_of_unknown(fields, where);
  return result;
}

}  // namespace accelerate::detail
