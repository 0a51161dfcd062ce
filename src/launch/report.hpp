#pragma once

#include <string>

#include "launch/supervisor.hpp"

namespace accelerate::launcher {

/// What the launcher says on stderr at the end; empty when all went well.
std::string report(const Job& job, const LogFiles& logs, const Outcome& outcome);

/// "was killed by signal 9 (SIGKILL)", "ended with exit code 3".
std::string describe(const End& end);

/// The message in a file that a rank left at TORCHELASTIC_ERROR_FILE (torchrun's format), or "".
std::string error_file_message(const std::filesystem::path& file);

}  // namespace accelerate::launcher
