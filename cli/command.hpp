#pragma once

#include <string>
#include <vector>

/// The program's commands. Adding one is adding a file to cli/commands/ that defines its function and a `const Registered`:
///
///     const Registered kRegistered({"launch", "Start a program in one or many processes", run});
namespace cli {

struct Command {
  std::string name;
  std::string summary;  ///< one line for `accelerate --help`
  /// Gets the arguments after the command's name; returns the exit code. May throw accelerate::Error.
  int (*run)(std::vector<std::string> arguments);
};

/// All registered commands, sorted by name.
const std::vector<Command>& commands();

struct Registered {
  explicit Registered(Command command);
};

}  // namespace cli
