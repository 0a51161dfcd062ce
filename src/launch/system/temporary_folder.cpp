#include "launch/system/temporary_folder.hpp"

#include <cstdlib>
#include <mutex>
#include <set>

#include "utils/raise.hpp"

namespace accelerate::launcher {
namespace {

std::mutex mutex;
std::set<std::string> living;

}  // namespace

std::filesystem::path new_temporary_folder() {
  const std::filesystem::path base = std::filesystem::temp_directory_path();
  std::string path = (base / "accelerate_launch_XXXXXX").string();
  if (!::mkdtemp(path.data()))
    raise<LaunchError>("no temporary folder can be created in {}. Is it writable and not full?", base.string());
  return path;
}

TemporaryFolder::TemporaryFolder() : path_(new_temporary_folder()) {
  const std::lock_guard lock(mutex);
  living.insert(path_);
}

TemporaryFolder::~TemporaryFolder() {
  {
    const std::lock_guard lock(mutex);
    living.erase(path_);
  }
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> temporary_folders() {
  const std::lock_guard lock(mutex);
  return {living.begin(), living.end()};
}

}  // namespace accelerate::launcher
