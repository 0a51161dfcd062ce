#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace accelerate::launcher {

struct Host;
class Settings;

/// Whether Python may run it though it has another ending: text, and not for another interpreter.
bool may_be_python(const std::filesystem::path& file);

/// Whether Python runs the program in any case: a module, a .py file, a Python interpreter, a text for one, or one that
/// nobody else would run.
bool is_python_program(const std::vector<std::string>& command, const Settings& settings, const Host& host);

}  // namespace accelerate::launcher
