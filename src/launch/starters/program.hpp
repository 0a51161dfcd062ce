#pragma once

#include <string>
#include <vector>

namespace accelerate::launcher {

struct Host;
struct Job;

/// The command line of a rank, or of the program that starts the ranks here (mpirun, srun, deepspeed, PyTorch/XLA):
/// element 0 is the path of the file to execute.
/// @throws ConfigError when there is no such program or it is not executable.
std::vector<std::string> command_line(const Job& job, const Host& host);

}  // namespace accelerate::launcher
