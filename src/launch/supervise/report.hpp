#pragma once

#include <filesystem>
#include <string>

namespace accelerate::launcher {

struct Job;
struct Outcome;
class LogFiles;

/// What the launcher says on stderr at the end; empty when all went well.
std::string report(const Job& job, const LogFiles& logs, const Outcome& outcome);

/// The message in a file that a rank left at TORCHELASTIC_ERROR_FILE (torchrun's format), or "".
std::string error_file_message(const std::filesystem::path& file);

}  // namespace accelerate::launcher
