#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace accelerate::launcher {

struct Host;
struct Job;
class Settings;

/// The words before the program that let mpirun start a process for each slot of --deepspeed_hostfile, as DeepSpeed's
/// `--launcher openmpi`, `mpich` and `mvapich` write them.
/// @throws ConfigError when there is no mpirun of that kind.
std::vector<std::string> deepspeed_mpirun_words(const Job& job, const Host& host);

/// The words for srun, likewise. The slots' number counts, and the machines' names where a filter chose them.
/// @throws ConfigError when there is no srun.
std::vector<std::string> deepspeed_srun_words(const Job& job, const Host& host);

/// The words before a Python program that let DeepSpeed's own starter run it on the machines of --deepspeed_hostfile.
/// @param port  where the processes meet
/// @throws ConfigError without a hostfile.
std::vector<std::string> deepspeed_words(const Settings& settings, int64_t port);

/// Adds the variables to ~/.deepspeed_env, from where DeepSpeed's starter takes what it gives to other machines.
/// Values with blanks, line ends, ';', '<' or '>' can't be said there; their names are returned.
/// @throws LaunchError when the file can't be written.
std::vector<std::string> add_to_deepspeed_env(const std::map<std::string, std::string>& variables, const Host& host);

}  // namespace accelerate::launcher
