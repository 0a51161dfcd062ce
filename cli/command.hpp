#pragma once

#include <string>
#include <vector>

#include "arguments.hpp"

/// The program's commands. Adding one is adding its table to accelerate/config/option.hpp's tables and a file to
/// cli/commands/ that defines its function and a `const Registered`:
///
///     const Registered kRegistered("launch", run);
namespace cli {

/// Gets what was given on the command line; returns the exit code. May throw accelerate::Error.
using Run = int (*)(const Arguments& arguments);

struct Registered {
  Registered(const std::string& name, Run run);
};

/// The table of a command. @throws InternalError when there is none.
const accelerate::config::CommandTable& table_of(const std::string& name);

/// The folder of this program, where the programs that it calls lie too.
std::string program_folder();

/// Replaces this process by a program that lies beside it (commands that need LibTorch are programs of their own).
/// Returns only by throwing.
[[noreturn]] void become(const std::string& program, const std::vector<std::string>& arguments);

}  // namespace cli
