#include "launch/starters/mpirun.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <sstream>

#include "input/read_file.hpp"
#include "launch/job/host.hpp"
#include "launch/job/require.hpp"
#include "launch/job/settings.hpp"
#include "launch/starters/shell_text.hpp"

namespace accelerate::launcher {
namespace {

/// Names at the beginning of the file's lines. MPICH writes host:slots, Open MPI host slots=n.
std::set<std::string> machines_in(const std::string& file) {
  std::string text;
  const auto problem = read_file(file, kMostSettingsBytes, text);
  require(problem.empty(), "--mpirun_hostfile {} can't be read: {}", file, problem);
  std::istringstream in(text);
  std::set<std::string> names;
  for (std::string line; std::getline(in, line);) {
    std::string name;
    std::istringstream(line) >> name;
    name = name.substr(0, name.find(':'));
    if (!name.empty() && name.front() != '#') names.insert(name);
  }
  return names;
}

bool is_open_mpi(const std::string& program) {
  std::string version;
  if (std::FILE* pipe = ::popen((quoted(program) + " --version 2>/dev/null").c_str(), "r")) {
    char buffer[256];
    while (std::fgets(buffer, sizeof(buffer), pipe)) version += buffer;
    ::pclose(pipe);
  }
  return version.find("Open MPI") != std::string::npos || version.find("OpenRTE") != std::string::npos;
}

/// A dry run may show a job for other machines than this one, which has the file.
bool names_several_machines(const std::string& file, const Settings& settings) {
  if (settings.on("dry_run") && !is_there(file)) return settings.num_machines() > 1;
  return machines_in(file).size() > 1;
}

}  // namespace

Mpirun Mpirun::find(const Host& host) {
  for (const char* name : {"mpirun", "mpiexec"})
    if (const auto path = host.find_in_path(name); !path.empty()) return {path, is_open_mpi(path)};
  raise<ConfigError>(
      "--mpirun_hostfile needs mpirun or mpiexec, and neither is in PATH. Install Open MPI (Debian: openmpi-bin), "
      "MPICH or Intel MPI");
}

Mpirun Mpirun::find(const Host& host, bool open_mpi) {
  std::string others;
  for (const std::string name : {"mpirun", "mpiexec", open_mpi ? "mpirun.openmpi" : "mpirun.mpich"}) {
    const auto path = host.find_in_path(name);
    if (path.empty()) continue;
    if (is_open_mpi(path) == open_mpi) return {path, open_mpi};
    others += fmt::format("{}{}", others.empty() ? "" : ", ", path.string());
  }
  raise<ConfigError>(
      "--deepspeed_multinode_launcher needs an mpirun or mpiexec of {}, and {} in PATH. Install it (Debian: {}), or "
      "give the launcher's name that is there",
      open_mpi ? "Open MPI" : "MPICH or MVAPICH",
      others.empty() ? "there is none" : "found only another kind, " + others, open_mpi ? "openmpi-bin" : "mpich");
}

std::vector<std::string> mpirun_words(const Mpirun& mpirun, const Settings& settings,
                                      const std::vector<std::string>& variables) {
  const std::string file = settings.text("mpirun_hostfile");
  const int64_t processes = settings.num_processes(), machines = std::max<int64_t>(1, settings.num_machines());
  const std::string each = std::to_string(processes > 0 ? processes / machines : 1);
  std::vector<std::string> words =
      mpirun.open_mpi ? std::vector<std::string>{mpirun.program, "--hostfile", file, "--npernode", each}
                      : std::vector<std::string>{mpirun.program, "-f", file, "-ppn", each};
  if (processes > 0) words.insert(words.end(), {"-n", std::to_string(processes)});
  if (mpirun.open_mpi) words.insert(words.end(), {"--bind-to", "socket"});
  if (!variables.empty() && names_several_machines(file, settings)) {
    require(!settings.text("main_process_ip").empty(),
            "--mpirun_hostfile names several machines, so that --main_process_ip must be given: the address of the "
            "first, where the processes meet");
    if (mpirun.open_mpi)
      for (const auto& name : variables) words.insert(words.end(), {"-x", name});
  }
  return words;
}

}  // namespace accelerate::launcher
