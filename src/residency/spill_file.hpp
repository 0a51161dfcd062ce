#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>

#include "utils/thread_annotations.hpp"

namespace accelerate::residency {

/// A file without a name that hands out room in itself; it vanishes with this object, or with the process however that
/// ends. Thread-safe. The errors are ResourceErrors that name the folder, the operation, the numbers and the system's
/// reason.
class SpillFile {
 public:
  /// For errors.
  struct Wording {
    const char* user;      ///< "activation offload"
    const char* contents;  ///< "the activations of this step"
    const char* advice;    ///< what to do when the disk is full, besides freeing some
  };
  /// @throws ConfigError if `directory` is not a folder, ResourceError if no file can be made in it.
  SpillFile(std::filesystem::path directory, const Wording& wording);
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;
  ~SpillFile();

  /// Room for `bytes`, on the disk where the file system can promise that: then a full disk shows here and not in
  /// write(). Returns its offset.
  int64_t reserve(int64_t bytes);
  void release(int64_t offset, int64_t bytes) noexcept;
  void write(int64_t offset, const void* data, int64_t bytes);
  void read(int64_t offset, void* data, int64_t bytes);
  /// Reserved room as memory of this process: writes to it are in the file. It stays until munmap().
  void* map(int64_t offset, int64_t bytes);

  /// For code that moves bytes itself, within what it has reserved.
  int descriptor() const { return file_; }
  /// @throws ResourceError that says so
  [[noreturn]] void fail(const char* operation, int64_t bytes, int error) const;

 private:
  const std::filesystem::path directory_;
  const Wording wording_;
  int file_ = -1;
  Mutex mutex_;
  std::atomic<int64_t> end_{0};  ///< of the file; changed with the mutex held, errors read it without
  std::map<int64_t, int64_t> holes_ ACCELERATE_GUARDED_BY(mutex_);  ///< offset -> bytes, never adjacent
};

}  // namespace accelerate::residency
