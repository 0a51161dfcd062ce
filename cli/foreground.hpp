#pragma once

#include <string>
#include <vector>

namespace cli {

/// Runs a program with this one's streams, in its process group, and waits for its end. A signal that would end this
/// process (SIGINT, SIGTERM, SIGHUP, SIGQUIT) goes to the program instead, which decides; where the terminal has told
/// both, as by Ctrl-C, nothing is added. The program gets SIGTERM when this process is killed.
/// @param command  a path, or a name that is looked for in PATH, and its arguments
/// @return its exit code, or 128 and the number of the signal that ended it, as shells say it
/// @throws LaunchError when it can't be started
int run_in_foreground(const std::vector<std::string>& command);

}  // namespace cli
