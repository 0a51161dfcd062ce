#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "utils/file_checksums.hpp"

namespace accelerate {

/// Flushes a file or a folder to the disk; what its file system has no flushing for is left to the system.
/// @param operation  begins the error messages  @throws CheckpointError, ResourceError (disk full)
void flush_to_disk(const std::string& operation, const std::filesystem::path& path);

/// Bytes that this process may still write to the disk of a folder; nothing where the file system does not say.
std::optional<int64_t> free_bytes(const std::filesystem::path& folder);

/// While it lives, each AtomicFile computes the checksums of what it writes into this folder, or below it, as it
/// writes: nothing is read for them. One at a time in a process; safe to use from several threads.
class RecordedFiles {
 public:
  explicit RecordedFiles(const std::filesystem::path& folder);
  ~RecordedFiles();
  RecordedFiles(const RecordedFiles&) = delete;
  RecordedFiles& operator=(const RecordedFiles&) = delete;

  /// Paths from the folder, in the order in which files got their names: of one name twice the later counts.
  const std::vector<std::pair<std::string, FileChecksums>>& files() const { return files_; }

 private:
  friend class AtomicFile;
  static bool wants(const std::filesystem::path& file);
  static void add(const std::filesystem::path& file, FileChecksums sums);

  std::filesystem::path folder_;
  std::vector<std::pair<std::string, FileChecksums>> files_;
};

/// A file that appears under its name when it is finished, and leaves nothing behind when it is not. Bytes are gathered
/// in memory, and go to the disk some MB at a time while the next ones come: past the system's cache (O_DIRECT) where
/// its file system can. That takes no processor time for a second copy of them, and leaves the cache to others.
class AtomicFile {
 public:
  static constexpr size_t kBufferBytes = size_t{4} << 20;  ///< of three

  /// `operation` begins the error messages, e.g. "save_safetensors". @throws CheckpointError, ResourceError (disk full)
  AtomicFile(std::string operation, const std::filesystem::path& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Blocks while all buffers are full. What a disk refuses may be an error of a later call, or of finish().
  void write(std::string_view bytes);
  /// Waits until the file that this thread writes, if there is one, takes a whole buffer's bytes without waiting: for
  /// who holds up others while it writes them.
  static void make_room_here();
  /// Gives the file its name. @param flush  to the disk first, so that the file is whole after a power cut too;
  /// without, after all that leaves the system running.
  void finish(bool flush = true);

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  void send();
  /// Waits until so many buffers at most are on their way.
  void settle(size_t buffers);
  [[noreturn]] void fail(const std::string& what) const;
  [[noreturn]] void fail_writing(size_t bytes) const;

  std::string operation_;
  std::filesystem::path path_;
  std::filesystem::path temporary_;
  int file_ = -1;
  int direct_ = -1;                                     ///< the same past the cache; -1: small so far, or there is none
  std::array<std::unique_ptr<char, Free>, 3> buffers_;  ///< in turns: one is being filled, those before it go
  size_t filling_ = 0, filled_ = 0;                     ///< which, and its bytes
  int64_t sent_ = 0;                                    ///< bytes, begun
  std::deque<std::future<int>> going_;                  ///< an errno, or 0, each
  bool finished_ = false;
  std::optional<ChecksumsInTurn> sums_;  ///< for RecordedFiles
  AtomicFile* outer_;                    ///< that this thread wrote before
};

/// Several files of a folder that appear under their names when all are finished, and leave nothing behind when they
/// are not: until then they lie in a folder within it.
class AtomicFiles {
 public:
  /// @throws CheckpointError, ResourceError, as AtomicFile
  AtomicFiles(std::string operation, const std::filesystem::path& folder);
  ~AtomicFiles();
  AtomicFiles(const AtomicFiles&) = delete;
  AtomicFiles& operator=(const AtomicFiles&) = delete;

  /// The path at which to write the file that will have this name.
  std::filesystem::path place(const std::string& name);
  /// Gives the files their names, in the order of place(). The last one of several says which belong together: one that
  /// is there is removed first, so that whoever looks meanwhile finds no mixture of old and new ones.
  void finish();

 private:
  std::string operation_;
  std::filesystem::path folder_;
  std::string temporary_;
  std::vector<std::string> names_;
};

}  // namespace accelerate
