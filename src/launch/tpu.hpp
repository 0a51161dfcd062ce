#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "launch/job.hpp"

namespace accelerate::launcher {

class Monitor;

/// The file that starts a Python program on this machine's TPU: PyTorch/XLA's processes want a module that each of them
/// can import. It is there as long as this object.
class XlaStarter {
 public:
  /// @throws ResourceError when no temporary folder can be made
  XlaStarter();
  ~XlaStarter();
  XlaStarter(const XlaStarter&) = delete;
  XlaStarter& operator=(const XlaStarter&) = delete;
  std::filesystem::path file() const { return folder_ / kName; }
  static constexpr const char* kName = "accelerate_xla.py";

 private:
  std::filesystem::path folder_;
};

/// The arguments of that file: how the program is named, its name, the function that each process calls, the program's
/// own arguments.
/// @throws ConfigError for what is no Python program: TPUs are driven by PyTorch/XLA, which LibTorch does not have
std::vector<std::string> xla_arguments(const Job& job);

/// What is run for a pod: one command for all its workers, or one for each of those that --vm or the config file's
/// tpu_vm names. Element 0 is "gcloud", found in PATH or not. @throws ConfigError when the pod has no name.
std::vector<std::vector<std::string>> pod_commands(const Job& job);

/// How many commands that are.
size_t num_pod_commands(const Settings& settings);

/// Runs them side by side until the last has ended. Blocking. @return the exit code of the one that failed first, else
/// 0. @throws NotBuiltError without gcloud
int launch_on_pod(Job job, const Host& host, Monitor* monitor = nullptr);

/// A command line as a shell takes it.
std::string shell_text(const std::vector<std::string>& words);

}  // namespace accelerate::launcher
