#include "accelerate/config.hpp"

#include <cstdlib>
#include <filesystem>
#include <optional>

#include "accelerate/utils/error.hpp"
#include "config/config_file.hpp"
#include "config/yaml.hpp"
#include "utils/device_types.hpp"

extern char** environ;  // NOLINT(readability-redundant-declaration): only GNU's headers declare it

namespace accelerate {
namespace {

namespace fs = std::filesystem;

config::Environment own_environment() {
  config::Environment result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text(*entry);
    if (const size_t equals = text.find('='); equals != std::string_view::npos)
      result.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return result;
}

std::string text_of(const config::Value& value) { return value.is_null() ? "" : config::python_text(value); }

}  // namespace

fs::path default_config_file() { return config::default_config_file(own_environment()); }

bool write_basic_config(const std::string& mixed_precision, fs::path file) {
  if (file.empty()) file = default_config_file();
  const auto config = config::basic_config(mixed_precision, count_accelerators());
  std::error_code ignored;
  if (fs::exists(file, ignored)) return false;
  config::save_config(config, file);
  return true;
}

void update_config(const fs::path& file) { config::save_config(config::load_config(file), file); }

std::vector<std::string> convert_config_to_fsdp2(const fs::path& file, const fs::path& output) {
  std::vector<std::string> notes;
  const auto converted = config::to_fsdp2(config::read_config(file), notes);
  config::write_config(converted, output);
  return notes;
}

std::vector<std::pair<std::string, std::string>> config_values(const fs::path& file) {
  std::vector<std::pair<std::string, std::string>> result;
  const auto config = config::without_empty(config::load_config(file));
  for (const auto& [key, value] : config.items()) {
    if (!value.is_object()) result.emplace_back(key, text_of(value));
    else
      for (const auto& [inner, setting] : value.items()) result.emplace_back(key + "." + inner, text_of(setting));
  }
  return result;
}

std::string config_as_json(const fs::path& file) {
  return config::write_json(config::without_empty(config::load_config(file)));
}

TpuConfig tpu_config(const fs::path& file) {
  const auto config = config::load_config(file);
  TpuConfig result;
  if (config::is_sagemaker(config)) return result;
  result.name = text_of(config["tpu_name"]);
  result.zone = text_of(config["tpu_zone"]);
  result.command_file = text_of(config["command_file"]);
  if (config["commands"].is_array())
    for (const auto& command : config["commands"]) result.commands.push_back(text_of(command));
  return result;
}

int64_t count_accelerators() {
  const auto* type = devices::present("/");
  if (!type) return 0;
  return devices::count(*type, "/", [](const char* name) {
    const char* text = std::getenv(name);
    return text ? std::optional<std::string>(text) : std::nullopt;
  });
}

}  // namespace accelerate
