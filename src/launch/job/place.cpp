#include "launch/job/place.hpp"

#include "launch/job/host.hpp"

namespace accelerate::launcher {

std::optional<LaunchPlace> place_in_mpi(const Host& host) {
  struct Names {
    const char *launcher, *rank, *world_size, *local_rank, *local_world_size;
  };
  constexpr Names kAll[] = {{"mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
                            {"mpirun (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
                             "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"},
                            {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}};
  for (const auto& names : kAll) {
    const auto rank = host.number(names.rank), world_size = host.number(names.world_size);
    if (!rank || !world_size || *world_size < 2 || *rank < 0 || *rank >= *world_size) continue;
    LaunchPlace place{.launcher = names.launcher, .rank = *rank, .world_size = *world_size, .local_rank = *rank};
    place.local_rank = host.number(names.local_rank).value_or(*rank);
    place.local_world_size = host.number(names.local_world_size).value_or(*world_size);
    return place;
  }
  return std::nullopt;
}

}  // namespace accelerate::launcher
