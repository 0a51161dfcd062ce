#pragma once

#include <string>
#include <vector>

#include "launch/job.hpp"

namespace accelerate::launcher {

/// The command line of a rank: element 0 is the path of the file to execute.
/// @throws ConfigError when there is no such program or it is not executable.
std::vector<std::string> command_line(const Job& job, const Host& host);

}  // namespace accelerate::launcher
