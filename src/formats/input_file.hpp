#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace accelerate::formats {

/// A regular file from which any range of bytes can be read, by several threads at once. Reading, rather than mapping:
/// a range goes straight to where it is wanted and the process holds no pages of the file; and a file that someone
/// shortens meanwhile is an error, not a SIGBUS.
class InputFile {
 public:
  /// @throws CheckpointError if it can't be opened or is no regular file.
  explicit InputFile(const std::filesystem::path& path);
  /// Bytes in memory as if they were such a file; `name` is for messages.
  InputFile(std::string name, std::string bytes);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  int64_t size() const { return size_; }
  /// Another descriptor of the same file, for the caller to close; -1 with errno, also for bytes in memory.
  int duplicate() const;
  /// Fills `count` bytes from `offset`. @throws CheckpointError when the file ends before.
  void read(int64_t offset, void* data, int64_t count) const;

 private:
  std::filesystem::path path_;
  std::string bytes_;  ///< unless there is a file
  int file_ = -1;
  int64_t size_ = 0;
};

}  // namespace accelerate::formats
