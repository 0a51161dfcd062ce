#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace sagemaker {

/// A file of the source archive.
struct SourceFile {
  std::string name;            ///< in the archive, with '/' between folders; a folder's own entry ends with '/'
  std::filesystem::path path;  ///< where it is read; empty for `content`
  std::string content;
  mode_t mode = 0644;
  int64_t bytes = 0;
  int64_t modified = 0;  ///< seconds since 1970
};

/// Everything below a folder by name, links replaced by what they point to, as the SageMaker SDK packs it. Pipes,
/// sockets and devices are left out.
/// @throws ConfigError when something can't be read, or a link leads back to a folder above itself.
std::vector<SourceFile> files_below(const std::filesystem::path& folder);

/// One file, or a folder with all below it, under its own name.
std::vector<SourceFile> files_of(const std::filesystem::path& path);

/// The files as .tar.gz, in memory: S3 takes up to 5 GB in one request. @throws ConfigError when a file can't be read
/// or has changed its size.
std::string tar_gz(const std::vector<SourceFile>& files);

}  // namespace sagemaker
