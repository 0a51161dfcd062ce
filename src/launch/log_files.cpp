#include "launch/log_files.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <sstream>

#include "accelerate/utils/error.hpp"

namespace accelerate::launcher {
namespace {

namespace fs = std::filesystem;

}  // namespace

fs::path new_temporary_folder() {
  std::string path = (fs::temp_directory_path() / "accelerate_launch_XXXXXX").string();
  if (!::mkdtemp(path.data()))
    throw LaunchError("no temporary folder can be created in " + fs::temp_directory_path().string() +
                      ". Is it writable and not full?");
  return path;
}

std::vector<int> parse_streams(const std::string& flag, const std::string& text, int64_t local_world_size) {
  const auto fail = [&] {
    return ConfigError(
        flag + " is '" + text +
        "', expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or such a number for each local rank as in 0:1,1:3");
  };
  const auto number = [&](std::string_view digits, int64_t highest) {
    int64_t value = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || value < 0 || value > highest) throw fail();
    return value;
  };
  if (text.find(':') == std::string::npos)
    return std::vector<int>(static_cast<size_t>(local_world_size), static_cast<int>(number(text, 3)));
  std::vector<int> result(static_cast<size_t>(local_world_size), kNoStream);
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const size_t colon = entry.find(':');
    if (colon == std::string::npos) throw fail();
    const int64_t local_rank = number(std::string_view(entry).substr(0, colon), INT32_MAX);
    const auto streams = static_cast<int>(number(std::string_view(entry).substr(colon + 1), 3));
    if (local_rank >= local_world_size)
      throw ConfigError(flag + " names local rank " + std::to_string(local_rank) +
                        ", but this machine has local ranks 0 to " + std::to_string(local_world_size - 1));
    result[static_cast<size_t>(local_rank)] = streams;
  }
  return result;
}

LogFiles::LogFiles(const Job& job) : ranks_(static_cast<size_t>(job.local_world_size)) {
  const auto& o = job.options;
  auto tee = parse_streams("--tee", o.tee, job.local_world_size);
  const auto redirects = parse_streams("--redirects", o.redirects, job.local_world_size);
  const auto any = [](const std::vector<int>& streams) {
    return std::any_of(streams.begin(), streams.end(), [](int s) { return s != kNoStream; });
  };
  const bool prefix = any(tee);
  const bool logs = prefix || any(redirects) || !o.log_dir.empty();
  // A folder for logs without a word on which streams: a copy of everything.
  if (!o.log_dir.empty() && !any(tee) && !any(redirects)) std::fill(tee.begin(), tee.end(), kStdout | kStderr);
  try {
    if (logs) folder_ = fs::absolute(o.log_dir.empty() ? new_temporary_folder() : o.log_dir) / job.run_id;
    else if (job.distributed()) scratch_ = new_temporary_folder();
    const fs::path base = logs ? folder_ / ("attempt_" + std::to_string(job.attempt)) : scratch_;
    for (size_t i = 0; i < ranks_.size() && !base.empty(); ++i) {
      const fs::path folder = base / std::to_string(i);
      fs::create_directories(folder);
      auto& rank = ranks_[i];
      rank.error_file = folder / "error.json";
      rank.prefix = prefix;
      const int files = tee[i] | redirects[i];
      const int hidden = redirects[i] & ~tee[i];
      if (files & kStdout) rank.stdout_file = folder / "stdout.log";
      if (files & kStderr) rank.stderr_file = folder / "stderr.log";
      rank.stdout_on_terminal = !(hidden & kStdout);
      rank.stderr_on_terminal = !(hidden & kStderr);
    }
  } catch (const fs::filesystem_error& error) {
    throw LaunchError(std::string("the folders for log files can't be created: ") + error.what() +
                      ". Choose another --log_dir");
  }
}

LogFiles::~LogFiles() {
  std::error_code ignored;
  if (!scratch_.empty()) std::filesystem::remove_all(scratch_, ignored);
}

}  // namespace accelerate::launcher
