#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace accelerate::launcher {

struct Host;

/// The rank that another launcher (mpirun, srun) has given this one in a job of its own: whatever it starts is that
/// rank.
struct LaunchPlace {
  std::string launcher;  ///< the name of the other one
  int64_t rank = 0;
  int64_t world_size = 1;
  int64_t local_rank = 0;
  int64_t local_world_size = 1;
  std::string address = "127.0.0.1";  ///< where the ranks meet, as far as that is known
  int64_t port = 29500;               ///< the same for all of them, so none that is free here
};

/// By the variables of Open MPI, MVAPICH, and Hydra (MPICH, Intel MPI), of which one speaks of more than one rank.
std::optional<LaunchPlace> place_in_mpi(const Host& host);

}  // namespace accelerate::launcher
