#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "accelerate/config/option.hpp"

/// Values of settings. They are JSON, because config files are; keys keep the order in which a file has them.
namespace accelerate::config {

using Value = nlohmann::ordered_json;

/// "yes", "true", "t", "y", "on", "1" and their opposites, in any case. @throws ConfigError naming `what` for anything
/// else.
bool str_to_bool(const std::string& text, const std::string& what = "the value");

/// The text of a flag or variable as the option's kind says. `name` is how the user wrote it. @throws ConfigError
Value parse_value(const Option& option, const std::string& text, const std::string& name);

/// The option's default; null if it has none.
Value default_value(const Option& option);

/// As Python's str() writes it: None, True, 1.0, [1, 2]. That is how the environment protocol spells values.
std::string python_text(const Value& value);

/// Python's truth: null, false, 0, "" and empty containers are false.
bool truthy(const Value& value);

}  // namespace accelerate::config
