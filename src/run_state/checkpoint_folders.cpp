#include "run_state/checkpoint_folders.hpp"

#include <algorithm>
#include <charconv>
#include <string>
#include <utility>
#include <vector>

#include "utils/raise.hpp"

namespace accelerate::run_state {

namespace fs = std::filesystem;
namespace {

const std::string kPrefix = "checkpoint_";

/// Oldest first.
std::vector<std::pair<int64_t, fs::path>> numbered_checkpoints(const fs::path& all) {
  std::vector<std::pair<int64_t, fs::path>> found;
  if (!fs::is_directory(all)) return found;
  for (const auto& entry : fs::directory_iterator(all))
    if (const auto number = checkpoint_number(entry.path()); number && entry.is_directory())
      found.emplace_back(*number, entry.path());
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

fs::path checkpoint_folder(const fs::path& all, int64_t number) { return all / (kPrefix + std::to_string(number)); }

std::optional<int64_t> checkpoint_number(const fs::path& folder) {
  const std::string name = folder.filename().string();
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int64_t number = 0;
  const char* last = name.data() + name.size();
  const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), last, number);
  return error == std::errc() && end == last ? std::optional(number) : std::nullopt;
}

fs::path newest_checkpoint(const fs::path& all) {
  const auto present = numbered_checkpoints(all);
  if (present.empty())
    raise<CheckpointError>(
        "load_state: found no checkpoint_<n> in '{}', expected at least one; was save_state() called with this "
        "project_dir?",
        all.string());
  return present.back().second;
}

void prune_checkpoints(const fs::path& all, int64_t limit) {
  const auto present = numbered_checkpoints(all);
  for (size_t i = 0; i + static_cast<size_t>(limit) < present.size(); ++i) fs::remove_all(present[i].second);
}

void make_folder(const fs::path& folder) {
  std::error_code failure;
  fs::create_directories(folder, failure);
  if (!fs::is_directory(folder))
    raise<CheckpointError>("save_state: the folder '{}' can't be created: {}", folder.string(), failure.message());
}

}  // namespace accelerate::run_state
