#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace accelerate::launcher {

struct Host;
struct Job;
class Settings;

/// The settings as variables for every process of the job: the reference's environment protocol (docs/settings.md names
/// them).
std::map<std::string, std::string> protocol(const Settings& settings, const Host& host);

/// The variables that a rank finds changed or added, compared with the launcher's own environment.
///
/// The protocol is the reference's: what its simple launcher sets for one process; with several, also what torchrun
/// sets for its workers.
std::map<std::string, std::string> build_environment(const Job& job, const Host& host, int64_t local_rank);

/// `changes` laid over the host's environment, as "NAME=value" for execve.
std::vector<std::string> merged(const Host& host, const std::map<std::string, std::string>& changes);

}  // namespace accelerate::launcher
