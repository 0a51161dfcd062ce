#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace accelerate::launcher {

/// An empty folder of a new name below the temporary one, for whoever keeps it. @throws LaunchError when there can't be
/// one.
std::filesystem::path new_temporary_folder();

/// Such a folder that is removed, with all that is in it, together with this object; by the Warden when the launcher is
/// killed.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  const std::filesystem::path path_;
};

/// The folders of this process that are there now.
std::vector<std::string> temporary_folders();

}  // namespace accelerate::launcher
