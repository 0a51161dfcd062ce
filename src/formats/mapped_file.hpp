#pragma once

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>

#include "input/read_file.hpp"

namespace accelerate::formats {

/// A whole file in memory, page by page as it is touched. Private: a write copies the page and the file stays as it is.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path) : MappedFile(descriptor_of(path), path) {}
  /// Maps the file of a descriptor, which is closed. @param path  for errors
  MappedFile(int file, const std::filesystem::path& path) {
    struct stat status {};
    if (file < 0 || ::fstat(file, &status) != 0)
      raise<CheckpointError>("can't read '{}': {}.", path.string(), std::strerror(errno));
    size_ = status.st_size;
    int error = 0;
    if (size_ > 0) {
      // Without a reservation of swap: a file larger than memory can be mapped, though it will hardly be written to.
      data_ = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file, 0);
      error = errno;
    }
    ::close(file);
    if (data_ == MAP_FAILED)
      raise<CheckpointError>("can't map the {} bytes of '{}': {}.", size_, path.string(), std::strerror(error));
    const auto problem = git_lfs_problem({data(), static_cast<size_t>(size_)});
    if (problem.empty()) return;
    ::munmap(data_, static_cast<size_t>(size_));
    raise<CheckpointError>("can't read '{}': {}.", path.string(), problem);
  }
  ~MappedFile() {
    if (size_ > 0) ::munmap(data_, static_cast<size_t>(size_));
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  int64_t size() const { return size_; }

 private:
  static int descriptor_of(const std::filesystem::path& path) {
    const auto opened = open_regular(path);
    if (opened.file < 0)
      raise<CheckpointError>("can't read '{}': {}. Check the path and the rights; pass the file, not its folder.",
                             path.string(), opened.problem);
    return opened.file;
  }

  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace accelerate::formats
