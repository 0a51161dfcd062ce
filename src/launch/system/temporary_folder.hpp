#pragma once

#include <filesystem>
#include <string>

namespace accelerate::launcher {

/// An empty folder of a new name below the temporary one, for whoever keeps it. @throws LaunchError when there can't be
/// one.
std::filesystem::path new_temporary_folder();

/// Such a folder that is removed, with all that is in it, together with this object.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_(new_temporary_folder()) {}
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  const std::filesystem::path path_;
};

}  // namespace accelerate::launcher
