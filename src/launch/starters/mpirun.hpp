#pragma once

#include <string>
#include <vector>

namespace accelerate::launcher {

struct Host;
class Settings;

/// The mpirun of this machine. Open MPI's takes other words than those of Intel MPI, MPICH and MVAPICH.
struct Mpirun {
  std::string program;
  bool open_mpi = false;
  /// Looks for mpirun, then mpiexec, and asks which one it is. @throws ConfigError when there is none.
  static Mpirun find(const Host& host);
  /// One of that kind, also under the name by which several lie beside each other (mpirun.openmpi, mpirun.mpich).
  static Mpirun find(const Host& host, bool open_mpi);
};

/// The words before the program that let mpirun start it on the machines of --mpirun_hostfile.
/// @param variables  that processes on other machines must get (Open MPI passes its own environment to none; the others
/// pass all of it)
/// @throws ConfigError when the file can't be read (but in a dry run, where there is none), or names several machines
/// and nobody said where the processes meet.
std::vector<std::string> mpirun_words(const Mpirun& mpirun, const Settings& settings,
                                      const std::vector<std::string>& variables);

}  // namespace accelerate::launcher
