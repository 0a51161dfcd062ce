#pragma once

#include <string>

#include "accelerate/config/option.hpp"
#include "config/value.hpp"

/// The rows of the launch table as Settings reads them.
namespace accelerate::launcher {

/// Calls `function` with each setting, also with those that have no flag.
template <class Function> void for_each_option(Function function) {
  for (const auto& group : config::launch_table().groups)
    for (const auto& option : group.options)
      if (!option.positional()) function(option);
}

/// @throws ConfigError, naming the nearest, when there is no such setting.
const config::Option& option_called(const std::string& name);

/// How a user would have written the setting: "--num_processes".
std::string flag_of(const config::Option& option);

/// Names of choices are written either way.
std::string in_small_letters(std::string text);

/// A file's value as the setting's kind: files say 'no' with and without quotes, numbers as text, "(false, false,
/// false)" for three. Null when it has none.
config::Value from_file(const config::Option& option, const config::Value& value, const std::string& file);

/// The value of a caller's environment variable. The protocol writes names in capitals that flags take in small
/// letters.
config::Value from_environment(const config::Option& option, std::string text);

}  // namespace accelerate::launcher
