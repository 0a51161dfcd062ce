#pragma once

#include "config/value.hpp"

/// YAML as PyYAML's safe_load and safe_dump understand it (YAML 1.1: `no` is false, `1e8` is text).
namespace accelerate::config {

/// @throws ConfigError with line and column for what is not YAML, holds tags or other things that a config file has no
/// use for, or is
///         larger or deeper than any config file (a file may say little and mean gigabytes).
Value read_yaml(const std::string& text, const std::string& file);

/// Keys sorted, blocks rather than brackets. `value` is an object.
std::string write_yaml(const Value& value);

/// Two blanks of indentation, keys sorted.
std::string write_json(const Value& value);

}  // namespace accelerate::config
