#pragma once

#include <filesystem>
#include <sstream>
#include <string>

#include "accelerate/utils/error.hpp"

namespace accelerate::models {

/// For validate() of configurations. @throws ConfigError unless `holds`.
template <class Value>
void check_field(bool holds, const char* config, const char* field, const Value& found, const std::string& expected) {
  if (holds) return;
  std::ostringstream text;
  text << config << ": " << field << " is " << found << ", expected " << expected << ".";
  throw ConfigError(text.str());
}

/// check_field for the fields of one configuration.
struct FieldCheck {
  const char* config;
  template <class Value>
  void operator()(bool holds, const char* field, const Value& found, const std::string& expected) const {
    check_field(holds, config, field, found, expected);
  }
};

/// The configuration that was read from `file`, if its fields fit together. @throws CheckpointError naming the file.
template <class Config> Config validated(Config config, const std::filesystem::path& file) {
  try {
    config.validate();
  } catch (const ConfigError& error) {
    throw CheckpointError("'" + file.string() + "': " + error.what());
  }
  return config;
}

}  // namespace accelerate::models
