#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

/// What the commands' argument parsers have in common.
namespace cli {

/// "--num_processes,--num-processes": every option may be written with either sign.
std::string spelled(const std::string& name);

/// A parser with our help layout.
class Parser : public CLI::App {
 public:
  Parser(const std::string& description, const std::string& name, const std::string& usage);

  /// Reads `arguments` up to the first that is not an option of this command.
  /// @return the arguments from there on ("--" before them is dropped), or nothing when help was asked for and printed.
  /// @throws ConfigError for what can't be understood, with the nearest option if there is one.
  std::optional<std::vector<std::string>> read(std::vector<std::string> arguments);
};

}  // namespace cli
