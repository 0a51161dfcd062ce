#include "config/config_file.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "accelerate/config.hpp"
#include "accelerate/config/option.hpp"
#include "config/yaml.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"

namespace accelerate::config {
namespace {

namespace fs = std::filesystem;

std::string variable(const Environment& environment, const std::string& name, const std::string& otherwise = "") {
  const auto found = environment.find(name);
  return found == environment.end() ? otherwise : found->second;
}

std::string expand_home(const std::string& path, const Environment& environment) {
  return path == "~" || path.starts_with("~/") ? variable(environment, "HOME") + path.substr(1) : path;
}

constexpr const char* kSections[] = {"fp8_config",         "deepspeed_config", "fsdp_config",   "parallelism_config",
                                     "megatron_lm_config", "mpirun_config",    "dynamo_config", "ipex_config"};

/// The reference's values for keys that a file leaves out; the others have none.
Value cluster_defaults() {
  Value config = Value::object();
  for (const auto& group : launch_table().groups)
    for (const auto& option : group.options)
      if (option.section && !*option.section) config[option.name] = option.kind == Kind::flag ? Value(false) : Value();
  for (const char* section : kSections) config[section] = Value::object();
  config.update({{"compute_environment", "LOCAL_MACHINE"},
                 {"num_processes", -1},
                 {"machine_rank", 0},
                 {"num_machines", 1},
                 {"rdzv_backend", "static"},
                 {"main_training_function", "main"}});
  return config;
}

Value sagemaker_defaults() {
  Value config = Value::object();
  for (const auto& option : sagemaker_keys()) config[option.name] = default_value(option);
  return config;
}

std::string list(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "'" : ", '") + word + "'";
  return text;
}

[[noreturn]] void unknown_keys(const std::string& file, const std::vector<std::string>& unknown,
                               const std::vector<std::string>& known) {
  std::string hints;
  for (const auto& key : unknown)
    if (const auto nearest = nearest_name(key, known)) hints += " Did you mean '" + *nearest + "' for '" + key + "'?";
  raise<ConfigError>(
      "the config file {} has unknown keys: {}.{} Correct or remove them, or update this program if a newer one "
      "wrote the file",
      file, list(unknown), hints);
}

/// A section as it is, unknown keys too: its readers decide what is read of it.
Value complete_section(const std::string& section, const Value& given, const std::string& file) {
  if (given.is_null()) return Value::object();
  if (!given.is_object())
    raise<ConfigError>("the config file {}: '{}' is not a group of keys and values", file, section);
  return given;
}

void check_choice(const Value& config, const char* key, std::span<const Option> options, const std::string& file) {
  for (const auto& option : options)
    if (option.name == std::string(key) && !config.at(key).is_null())
      parse_value(option, python_text(config.at(key)), "the config file " + file + ": " + key);
}

}  // namespace

std::string setting_name(const std::string& section, const std::string& key) {
  for (const auto& alias : aliases())
    if (section == alias.section && key == alias.key) return alias.name;
  const std::string prefix = section == "fsdp_config"     ? "fsdp_"
                             : section == "fp8_config"    ? "fp8_"
                             : section == "dynamo_config" ? "dynamo_"
                                                          : "";
  return key.starts_with(prefix) ? key : prefix + key;
}

const Option* option_of(const std::string& section, const std::string& key) {
  const std::string name = setting_name(section, key);
  for (const auto& group : launch_table().groups)
    for (const auto& option : group.options)
      if (option.section && option.section == section && option.kind != Kind::unset && name == option.name)
        return &option;
  return nullptr;
}

std::optional<std::string> nearest_key(const std::string& section, const std::string& key) {
  std::vector<std::string> known;
  for (const auto& group : launch_table().groups)
    for (const auto& option : group.options)
      if (option.section && option.section == section) known.emplace_back(option.name);
  return nearest_name(setting_name(section, key), known);
}

fs::path default_config_file(const Environment& environment) {
  const std::string cache = variable(environment, "XDG_CACHE_HOME", "~/.cache");
  const fs::path folder =
      fs::path(expand_home(variable(environment, "HF_HOME", cache + "/huggingface"), environment)) / "accelerate";
  std::error_code ignored;
  if (!fs::is_regular_file(folder / "default_config.yaml", ignored) &&
      fs::is_regular_file(folder / "default_config.json", ignored))
    return folder / "default_config.json";
  return folder / "default_config.yaml";
}

Value read_config(const fs::path& file) {
  std::error_code ignored;
  if (fs::is_directory(file, ignored)) raise<ConfigError>("the config file {} is a folder", file.string());
  std::string text, problem;
  if (const auto why = read_file(file, kMostSettingsBytes, text); !why.empty())
    raise<ConfigError>("the config file {}{}", file.string(),
                       !fs::exists(file, ignored)
                           ? " does not exist. Write one with `accelerate config`, or leave --config_file out"
                           : " can't be read: " + why);
  if (file.extension() != ".json") return read_yaml(text, file.string());
  auto json = parse_json<Value>(text, &problem);
  if (json.is_discarded())
    raise<ConfigError>("the config file {} is not JSON, which its name says that it is: it {}", file.string(), problem);
  return json;
}

bool is_sagemaker(const Value& config) { return config.at("compute_environment") == "AMAZON_SAGEMAKER"; }

Value complete_config(Value given, const std::string& file) {
  if (!given.is_object())
    raise<ConfigError>("the config file {} has no keys and values{}. `accelerate config` writes one", file,
                       given.is_null() ? ": it is empty" : "");
  if (given.value("compute_environment", Value()).is_null()) given["compute_environment"] = "LOCAL_MACHINE";
  const bool cluster = given["compute_environment"] == "LOCAL_MACHINE";
  if (given.value("distributed_type", Value()).is_null())
    raise<ConfigError>(
        "the config file {} has no 'distributed_type', which says what kind of training it is for ('NO' for one "
        "process)",
        file);
  if (given["distributed_type"] == false)
    given["distributed_type"] = "NO";  // written without quotes, NO is YAML's false
  if (cluster && given["distributed_type"] == "NO" && !given.contains("num_processes")) given["num_processes"] = 1;
  if (!given.contains("mixed_precision"))
    given["mixed_precision"] = truthy(given.value("fp16", Value())) ? Value("fp16") : Value();
  if (given["mixed_precision"] == false) given["mixed_precision"] = "no";
  given.erase("fp16");
  if (given.contains("dynamo_backend")) {
    const Value backend = given["dynamo_backend"];
    given.erase("dynamo_backend");
    given["dynamo_config"] = backend == "NO" || backend == false ? Value::object() : Value{{"dynamo_backend", backend}};
  }
  Value config = cluster ? cluster_defaults() : sagemaker_defaults();
  std::vector<std::string> unknown, known;
  for (const auto& [key, value] : given.items()) {
    if (config.contains(key)) config[key] = value;
    else unknown.push_back(key);
  }
  if (!unknown.empty()) {
    for (const auto& [key, value] : config.items()) known.push_back(key);
    std::sort(unknown.begin(), unknown.end());
    unknown_keys(file, unknown, known);
  }
  if (cluster) {
    for (const char* section : kSections) config[section] = complete_section(section, config[section], file);
    for (const auto& group : launch_table().groups)
      for (const char* key : {"compute_environment", "distributed_type"})
        check_choice(config, key, group.options, file);
  } else {
    for (const char* key : {"compute_environment", "distributed_type"})
      check_choice(config, key, sagemaker_keys(), file);
    for (const auto& option : sagemaker_keys())
      if (option.required && config[option.name].is_null())
        raise<ConfigError>("the config file {} has no '{}', which Amazon SageMaker needs", file, option.name);
  }
  return config;
}

Value load_config(const fs::path& file) { return complete_config(read_config(file), file.string()); }

Value without_empty(const Value& config) {
  Value result = Value::object();
  for (const auto& [key, value] : config.items())
    if (!value.is_null() && !(value.is_object() && value.empty())) result[key] = value;
  return result;
}

void save_config(const Value& config, const fs::path& file) { write_config(without_empty(config), file); }

void write_config(const Value& written, const fs::path& file) {
  const std::string text = file.extension() == ".json" ? write_json(written) : write_yaml(written);
  std::error_code error;
  if (file.has_parent_path()) fs::create_directories(file.parent_path(), error);
  const fs::path temporary = file.string() + ".new" + std::to_string(::getpid());
  std::ofstream out(temporary, std::ios::binary);
  out << text;
  out.close();
  if (out.good()) fs::rename(temporary, file, error);
  if (out.good() && !error) return;
  const std::string why = error ? error.message() : std::strerror(errno);
  fs::remove(temporary, error);
  raise<ConfigError>("the config file {} can't be written: {}", file.string(), why);
}

Value basic_config(const std::string& mixed_precision, int64_t accelerators) {
  std::string precision;
  for (const char c : mixed_precision) precision += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  parse_value(*launch_table().find("mixed_precision"), precision, "the mixed precision");
  return complete_config({{"mixed_precision", precision},
                          {"use_cpu", accelerators == 0},
                          {"num_processes", std::max<int64_t>(1, accelerators)},
                          {"distributed_type", accelerators > 1 ? "MULTI_GPU" : "NO"}},
                         "default");
}

Value to_fsdp2(Value config, std::vector<std::string>& notes) {
  const Value old = config.is_object() ? config.value("fsdp_config", Value::object()) : Value::object();
  if (!truthy(old)) return notes.emplace_back("there is no fsdp_config: nothing to convert"), config;
  if (!old.is_object()) raise<ConfigError>("'fsdp_config' is not a group of keys and values");
  if (old.contains("fsdp_version") && (old["fsdp_version"] == 2 || old["fsdp_version"] == "2"))
    return notes.emplace_back("the file is for FSDP version 2 already: nothing to convert"), config;
  Value converted = Value::object();
  for (const auto& [key, value] : old.items()) {
    const bool strategy = key == "fsdp_sharding_strategy" || key == "fsdp_reshard_after_forward";
    if (key == "fsdp_backward_prefetch" || key == "fsdp_sync_module_states" || key == "fsdp_use_orig_params" ||
        key == "fsdp_forward_prefetch") {
      notes.push_back(key + " is left out: version 2 has no such setting");
    } else if (strategy) {
      Value reshard = value;
      if (value == "FULL_SHARD" || value == "HYBRID_SHARD") reshard = true;
      if (value == "SHARD_GRAD_OP" || value == "HYBRID_SHARD_ZERO2" || value == "NO_SHARD") reshard = false;
      converted["fsdp_reshard_after_forward"] = reshard;
    } else {
      converted[key] = value;
    }
  }
  converted["fsdp_version"] = 2;
  config["fsdp_config"] = converted;
  return config;
}

}  // namespace accelerate::config
