#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "launch/system/temporary_folder.hpp"

namespace accelerate::launcher {

struct Job;

/// The files that one rank writes; empty paths mean "no file".
struct RankLogs {
  std::filesystem::path stdout_file, stderr_file;
  bool stdout_on_terminal = true, stderr_on_terminal = true;
  int marked = 0;                    ///< streams (kStdout, kStderr) whose lines on the terminal begin with their rank
  std::filesystem::path error_file;  ///< where the rank may leave JSON on why it failed (TORCHELASTIC_ERROR_FILE)
};

/// The folders of one run. Creates them; removes again what only the launcher needed.
class LogFiles {
 public:
  /// @throws LaunchError when a folder can't be created.
  explicit LogFiles(const Job& job);
  LogFiles(const LogFiles&) = delete;
  LogFiles& operator=(const LogFiles&) = delete;

  const RankLogs& of(int64_t local_rank) const { return ranks_[static_cast<size_t>(local_rank)]; }
  /// log_dir/run id, or empty when no log files were asked for.
  const std::filesystem::path& folder() const { return folder_; }

 private:
  std::vector<RankLogs> ranks_;
  std::filesystem::path folder_;
  std::optional<TemporaryFolder> scratch_;  ///< for what ranks leave on why they failed, where nobody wants logs
};

}  // namespace accelerate::launcher
