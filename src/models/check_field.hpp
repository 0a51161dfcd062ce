#pragma once

#include <filesystem>
#include <string>

#include "utils/raise.hpp"

namespace accelerate::models {

/// For validate() of configurations. @throws ConfigError unless `holds`.
template <class Value>
void check_field(bool holds, const char* config, const char* field, const Value& found, const std::string& expected) {
  if (!holds) raise<ConfigError>("{}: {} is {}, expected {}.", config, field, found, expected);
}

/// check_field for the fields of one configuration.
struct FieldCheck {
  const char* config;
  template <class Value>
  void operator()(bool holds, const char* field, const Value& found, const std::string& expected) const {
    check_field(holds, config, field, found, expected);
  }
};

/// The configuration, if its fields fit together. @throws ConfigError
template <class Config> const Config& valid(const Config& config) {
  config.validate();
  return config;
}

/// The configuration that was read from `file`, if its fields fit together. @throws CheckpointError naming the file.
template <class Config> Config validated(Config config, const std::filesystem::path& file) {
  try {
    config.validate();
  } catch (const ConfigError& error) {
    raise<CheckpointError>("'{}': {}", file.string(), error.what());
  }
  return config;
}

}  // namespace accelerate::models
