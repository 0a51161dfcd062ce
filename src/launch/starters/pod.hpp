#pragma once

#include <string>
#include <vector>

namespace accelerate::launcher {

struct Host;
struct Job;
class Monitor;

/// The commands for a TPU pod: one command for all its workers, or one for each of those that --vm or the config file's
/// tpu_vm names. Element 0 is "gcloud", found in PATH or not. @throws ConfigError when the pod has no name.
std::vector<std::vector<std::string>> pod_commands(const Job& job);

/// Runs them side by side until the last has ended. Blocking. @return the exit code of the one that failed first, else
/// 0. @throws NotBuiltError without gcloud
int launch_on_pod(const Job& job, const Host& host, Monitor* monitor = nullptr);

}  // namespace accelerate::launcher
