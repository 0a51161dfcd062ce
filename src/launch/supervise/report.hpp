#pragma once

#include <filesystem>
#include <string>

namespace accelerate::launcher {

struct Host;
struct Job;
struct Outcome;
class LogFiles;

/// The launcher's text on stderr at the end; empty when all went well.
std::string report(const Job& job, const LogFiles& logs, const Outcome& outcome);

/// Hands the failed rank's error file on to whoever started the launcher: into the file that its own
/// TORCHELASTIC_ERROR_FILE names, with the exit code, as torchrun does. An attempt that ends well takes it back.
void hand_on_error_file(const Job& job, const Host& host, const LogFiles& logs, const Outcome& outcome);

/// The message in a file that a rank left at TORCHELASTIC_ERROR_FILE (torchrun's format), or "".
std::string error_file_message(const std::filesystem::path& file);

}  // namespace accelerate::launcher
