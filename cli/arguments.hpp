#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/config/option.hpp"

/// Command lines, read and explained by the tables of accelerate/config/option.hpp.
namespace cli {

struct Arguments {
  /// Names and texts of what was given, in order; "true" or "false" for flags.
  std::vector<std::pair<std::string, std::string>> given;
  std::vector<std::string> positional;

  /// The last word on an option, or `otherwise`.
  std::string text(const std::string& name, const std::string& otherwise = "") const;
  bool on(const std::string& name) const { return text(name) == "true"; }
  /// All words that were given for an option.
  std::vector<std::string> all(const std::string& name) const;
};

/// Reads the arguments of a command. One that takes a program and its arguments stops at the first that is no option
/// (and drops "--" before it).
/// @return nothing when help was asked for, which has been printed then.
/// @throws ConfigError for what can't be understood, with the nearest option if there is one.
std::optional<Arguments> read(const accelerate::config::CommandTable& table, const std::vector<std::string>& arguments);

/// The text of --help.
std::string help(const accelerate::config::CommandTable& table);

}  // namespace cli
