#include "launch/system/temporary_folder.hpp"

#include <cstdlib>

#include "utils/raise.hpp"

namespace accelerate::launcher {

std::filesystem::path new_temporary_folder() {
  const std::filesystem::path base = std::filesystem::temp_directory_path();
  std::string path = (base / "accelerate_launch_XXXXXX").string();
  if (!::mkdtemp(path.data()))
    raise<LaunchError>("no temporary folder can be created in {}. Is it writable and not full?", base.string());
  return path;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace accelerate::launcher
