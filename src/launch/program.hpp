#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "launch/job.hpp"

namespace accelerate::launcher {

/// The first executable called `name` in the caller's PATH, or an empty path.
std::filesystem::path find_in_path(const std::string& name, const Host& host);

/// The command line of a rank, or of mpirun where that starts the ranks: element 0 is the path of the file to execute.
/// @throws ConfigError when there is no such program or it is not executable.
std::vector<std::string> command_line(const Job& job, const Host& host);

}  // namespace accelerate::launcher
