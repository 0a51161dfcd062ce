#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "arguments.hpp"

/// The program's commands.
///
/// A new one is a file in cli/commands/ (found by itself) with its function and a `const Registered`, and its options
/// as a table in src/config/command_tables.cpp, from which come its parser, help, completion, manual page and docs:
///
///     const cli::Registered kEnvCommand("env", run_env);
///
/// A command that needs LibTorch has a program of its own in programs/, which it calls by become(): so `accelerate`
/// starts in milliseconds.
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

/// The config file that a launch takes its defaults from: --config_file, else the default one if it is there and --cpu
/// is not given. Empty: none.
std::filesystem::path launch_config_file(const Arguments& arguments);

/// Replaces this process by a program that lies beside it (commands that need LibTorch are programs of their own).
/// Returns only by throwing.
[[noreturn]] void become(const std::string& program, const std::vector<std::string>& arguments);

}  // namespace cli
