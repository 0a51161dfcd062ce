#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "launch/job.hpp"

namespace accelerate::launcher {

/// Bits of torchrun's notation for "which streams".
enum Streams : int { kNoStream = 0, kStdout = 1, kStderr = 2 };

/// Reads "3" (all ranks alike) or "0:1,2:3" (by local rank; the others none).
/// @return one value per local rank, a combination of Streams.
/// @throws ConfigError naming `flag`.
std::vector<int> parse_streams(const std::string& flag, const std::string& text, int64_t local_world_size);

/// Where one rank writes; empty paths mean "no file".
struct RankLogs {
  std::filesystem::path stdout_file, stderr_file;
  bool stdout_on_terminal = true, stderr_on_terminal = true;
  bool prefix = false;               ///< lines on the terminal start with "[rank0]:"
  std::filesystem::path error_file;  ///< where the rank may leave JSON on why it failed (TORCHELASTIC_ERROR_FILE)
};

/// An empty folder of a new name below the temporary one. @throws LaunchError when there can't be one.
std::filesystem::path new_temporary_folder();

/// The folders of one run. Creates them; removes again what only the launcher needed.
class LogFiles {
 public:
  /// @throws LaunchError when a folder can't be created.
  explicit LogFiles(const Job& job);
  ~LogFiles();
  LogFiles(const LogFiles&) = delete;
  LogFiles& operator=(const LogFiles&) = delete;

  const RankLogs& of(int64_t local_rank) const { return ranks_[static_cast<size_t>(local_rank)]; }
  /// log_dir/run id, or empty when no log files were asked for.
  const std::filesystem::path& folder() const { return folder_; }

 private:
  std::vector<RankLogs> ranks_;
  std::filesystem::path folder_, scratch_;
};

}  // namespace accelerate::launcher
