#include "launch/supervise/log_files.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "launch/job/job.hpp"
#include "launch/job/streams.hpp"
#include "utils/raise.hpp"

namespace accelerate::launcher {

namespace fs = std::filesystem;

namespace {

/// A folder of logs may lie where others can write, as /tmp: what they made or linked there is not taken for ours.
void create_own_folders(const fs::path& base, const fs::path& below) {
  fs::path folder = base;
  for (const auto& part : below) {
    folder /= part;
    fs::create_directory(folder);
    struct stat info {};
    if (::lstat(folder.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != ::geteuid())
      raise<LaunchError>("the folder {} for log files is a link or belongs to somebody else. Choose another --log_dir",
                         folder.string());
  }
}

}  // namespace

LogFiles::LogFiles(const Job& job) : ranks_(static_cast<size_t>(job.local_world_size)) {
  const fs::path log_dir = job.settings.text("log_dir");
  auto tee = parse_streams("--tee", job.settings.text("tee"), job.local_world_size);
  const auto redirects = parse_streams("--redirects", job.settings.text("redirects"), job.local_world_size);
  const auto any = [](const std::vector<int>& streams) {
    return std::any_of(streams.begin(), streams.end(), [](int s) { return s != kNoStream; });
  };
  const auto shown = tee;  // after a mark of their rank
  const bool logs = any(tee) || any(redirects) || !log_dir.empty();
  // A folder for logs without a word on which streams: a copy of everything.
  if (!log_dir.empty() && !any(tee) && !any(redirects)) std::fill(tee.begin(), tee.end(), kStdout | kStderr);
  try {
    if (logs) folder_ = fs::absolute(log_dir.empty() ? new_temporary_folder() : log_dir) / job.run_id;
    else if (job.distributed()) scratch_.emplace();
    if (logs) fs::create_directories(folder_.parent_path());
    for (size_t i = 0; i < ranks_.size(); ++i) {
      auto& rank = ranks_[i];
      if (scratch_) rank.error_file = scratch_->path() / fmt::format("error_{}.json", i);
      if (!logs) continue;
      const fs::path below = job.run_id / fs::path(fmt::format("attempt_{}", job.attempt)) / std::to_string(i);
      create_own_folders(folder_.parent_path(), below);
      const fs::path folder = folder_.parent_path() / below;
      rank.error_file = folder / "error.json";
      rank.marked = shown[i];
      const int files = tee[i] | redirects[i];
      const int hidden = redirects[i] & ~tee[i];
      if (files & kStdout) rank.stdout_file = folder / "stdout.log";
      if (files & kStderr) rank.stderr_file = folder / "stderr.log";
      rank.stdout_on_terminal = !(hidden & kStdout);
      rank.stderr_on_terminal = !(hidden & kStderr);
    }
  } catch (const fs::filesystem_error& error) {
    raise<LaunchError>("the folders for log files can't be created: {}. Choose another --log_dir", error.what());
  }
}

}  // namespace accelerate::launcher
