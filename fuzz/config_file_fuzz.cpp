#include <cstdlib>
#include <string>

#include "accelerate/utils/error.hpp"
#include "config/config_file.hpp"
#include "config/yaml.hpp"

// Any bytes are a config that reads the same after it was written, or a ConfigError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const auto value = config::read_yaml(text, "fuzz");
    if (!value.is_object()) return 0;
    // Bytes that are no UTF-8 are replaced when they are written; from then on nothing changes.
    const auto once = config::read_yaml(config::write_yaml(value), "fuzz");
    const auto twice = config::read_yaml(config::write_yaml(once), "fuzz");
    if (config::write_yaml(once) != config::write_yaml(twice)) std::abort();
    // A key that says nothing is left out when the file is written; from then on nothing changes.
    const auto again = [](const config::Value& complete) {
      return config::complete_config(config::without_empty(complete), "fuzz");
    };
    const auto complete = again(config::complete_config(value, "fuzz"));
    if (again(complete) != complete) std::abort();
    config::write_json(complete);
  } catch (const ConfigError&) {
  }
  return 0;
}
