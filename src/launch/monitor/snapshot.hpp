#pragma once

#include <sys/types.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace accelerate::launcher {

struct GpuUse {
  int64_t index = 0;
  std::string name = {};                ///< "NVIDIA H100 80GB HBM3", or ""
  std::optional<int64_t> busy_percent;  ///< unknown for parts of a GPU (MIG)
  int64_t used_bytes = 0, total_bytes = 0;
};

/// A rank as it is now. Numbers that nobody knows are absent.
struct RankView {
  std::string name;  ///< its rank, or who was started in its place: a machine of --hostfile, mpirun
  int64_t local_rank = 0;
  pid_t pid = -1;
  std::string state;   ///< starting (has neither written nor stepped), running, stopping, done, failed, stopped
  std::string end;     ///< "exit code 3" or "SIGKILL" of one that failed or was stopped
  double seconds = 0;  ///< that it has run
  std::optional<int64_t> steps;
  std::optional<double> steps_per_second;  ///< over the last ten seconds or steps, whichever takes longer
  std::optional<double> cpu_percent;       ///< of one core, with all its processes
  std::optional<int64_t> resident_bytes;   ///< of all its processes; what they share counts for each
  std::optional<GpuUse> gpu;
  std::optional<int64_t> tokens;
  std::optional<double> tokens_per_second;
  std::optional<double> flops_per_second;              ///< of the model
  std::optional<double> peak_flops;                    ///< that its device could do in a second
  std::optional<double> comm_share;                    ///< of its time that it waits for other ranks, 0 to 1
  std::optional<double> data_share;                    ///< and for batches
  std::string last_line;                               ///< plain text
  std::vector<std::pair<std::string, double>> logged;  ///< what its program has logged last, by name
};

/// Model FLOPs utilisation: the share of what the device could do that the model's operations are.
std::optional<double> utilisation(const RankView& rank);

/// The figures that the views show.
struct Snapshot {
  std::string program;  ///< the name only; arguments may hold secrets
  std::string url;      ///< of the page, or ""
  double seconds = 0;   ///< since the monitor began, all attempts
  double interval = 1;  ///< seconds until the next snapshot
  int64_t attempt = 0, max_restarts = 0;
  int64_t machine_rank = 0, num_machines = 1, world_size = 1;
  bool waiting = false;  ///< for the other machines; the ranks are those of the last attempt
  std::vector<RankView> ranks;
};

nlohmann::ordered_json to_json(const Snapshot& snapshot);

/// A table in lines of at most `width` columns: what the job does, names of columns, ranks. Ranks that don't fit into
/// `max_lines` are summed up in the last line; those that failed are the last to be left out.
/// @param colours  with escape sequences for colours
std::vector<std::string> to_lines(const Snapshot& snapshot, size_t width, size_t max_lines, bool colours);

}  // namespace accelerate::launcher
