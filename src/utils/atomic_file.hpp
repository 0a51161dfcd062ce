#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace accelerate {

/// A file that appears under its name when it is finished, and leaves nothing behind when it is not.
class AtomicFile {
 public:
  /// `operation` begins the error messages, e.g. "save_safetensors". @throws CheckpointError, ResourceError (disk full)
  AtomicFile(std::string operation, const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::string_view bytes);
  /// Gives the file its name. @param flush  to the disk first, so that the file is whole after a power cut too;
  /// without, after all that leaves the system running.
  void finish(bool flush = true);

 private:
  [[noreturn]] void fail(const std::string& what) const;

  std::string operation_;
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int file_ = -1;
  bool finished_ = false;
};

}  // namespace accelerate
