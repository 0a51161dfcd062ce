#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

/// Slurm's description of a process that srun has started. Without LibTorch: the launcher reads it too.
namespace accelerate::slurm {

/// A task of a step. In a batch script or an interactive allocation, outside of srun, there is none.
struct Task {
  int64_t rank = 0;
  int64_t world_size = 1;
  int64_t local_rank = 0;
  int64_t local_world_size = 1;
  std::string address;  ///< of the machine that has rank 0
  int64_t port = 0;  ///< the same for all tasks of a step and, within a machine's last jobs, for no other: from 15000
                     ///< to 29999, where systems choose none by themselves
  std::string step;  ///< "JOB.STEP", as squeue shows it
};

/// The variable, or nothing when it is unset or empty.
using Variable = std::function<std::optional<std::string>(const char* name)>;

/// @throws ConfigError a variable that Slurm would not have set so.
std::optional<Task> this_task(const Variable& variable);

/// The first of a list of machines as Slurm abbreviates it: "rack1n07" of "rack[1-3]n[07,09],login".
std::string first_machine(const std::string& list);

}  // namespace accelerate::slurm
