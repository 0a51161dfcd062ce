#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "launch/system/temporary_folder.hpp"

namespace accelerate::launcher {

struct Job;

/// The file that starts a Python program on this machine's TPU: PyTorch/XLA's processes want a module that each of them
/// can import. It is there as long as this object.
class XlaStarter {
 public:
  /// Writes it and names it to the job. @throws LaunchError when it can't be written.
  explicit XlaStarter(Job& job);

 private:
  const TemporaryFolder folder_;
};

/// That file and its arguments: how the program is named, its name, the function that each process calls, the program's
/// own arguments.
/// @throws ConfigError for what is no Python program: TPUs are driven by PyTorch/XLA, which LibTorch does not have
std::vector<std::string> xla_words(const Job& job);

/// The function of a Python program that each TPU process calls.
std::string training_function(const Job& job);

/// @throws ConfigError when the job's program is not one for Python.
void require_python_program(const Job& job);

}  // namespace accelerate::launcher
