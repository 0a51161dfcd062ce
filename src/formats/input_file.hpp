#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "formats/expected_files.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {

/// A regular file that is read at given offsets, from any thread. It is open while it is read, and may be closed
/// between two reads: a checkpoint of a thousand ranks has more files than a process may have open. Those that were
/// read last stay open, up to half of what the process may have. One of the ExpectedFiles gives no bytes but those that
/// are expected: DamagedFile then. Each of its parts is read once for that by who reads from its beginning to its end.
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
  /// Fills `count` bytes from `offset`. @throws CheckpointError when the file ends before, and when there is another
  /// file in its place.
  void read(int64_t offset, void* data, int64_t count) const;
  /// Whether records are to be told of: see CheckedRecords.
  bool wants_records() const { return !expected_ && CheckedRecords::wanted(); }
  /// From now on these bytes are checked before any of them is given. @return false: another record that is known
  /// reaches into it. Several threads may call this while others read.
  bool expect_record(const std::string& name, int64_t begin, int64_t bytes, uint32_t crc32) const;
  /// Reads what was not looked at yet of one of the ExpectedFiles, or of records that are known, for who takes the
  /// bytes in another way (maps it).
  void check(int64_t offset, int64_t count) const;
  /// As read(), but of one of the ExpectedFiles nobody has looked at the bytes: who goes by them calls check() before
  /// anything rests on them.
  void peek(int64_t offset, void* data, int64_t count) const {
    if (expected_) read_unchecked(offset, data, count);
    else read(offset, data, count);
  }

  /// How often this process has opened such files.
  static int64_t times_opened() { return times_opened_.load(std::memory_order_relaxed); }
  /// The bytes that this process has read from such files, those for checksums included.
  static int64_t bytes_read() { return bytes_read_.load(std::memory_order_relaxed); }

 private:
  struct Descriptor;
  struct OpenFiles;
  struct LastPart;
  static OpenFiles& open_files();
  static LastPart& last_part();
  /// The descriptor of a file that is not just bytes in memory.
  std::shared_ptr<const Descriptor> opened() const;
  std::shared_ptr<const Descriptor> open_anew() const;
  void keep(const std::shared_ptr<const Descriptor>& descriptor) const;
  void read_unchecked(int64_t offset, void* data, int64_t count) const;
  /// Reads what is expected. @param to  null: nowhere
  void read_by_parts(int64_t offset, char* to, int64_t count) const;
  bool take_from_last_part(int64_t offset, char* to, int64_t count) const;
  void read_as_last_part(const ExpectedFile::Part& part, int64_t offset, char* to, int64_t count) const;
  /// @param data  the bytes from `offset` that are in memory already; null: none
  void check_records(int64_t offset, int64_t count, const char* data) const;
  struct Records;

  std::filesystem::path path_;
  std::string bytes_;  ///< unless there is a file
  bool in_memory_ = false;
  int64_t size_ = 0;
  mutable std::atomic<int64_t> read_to_{0};  ///< where the latest reader ended
  uint64_t device_ = 0, inode_ = 0;
  std::shared_ptr<const ExpectedFile> expected_;  ///< null: nothing is known
  std::unique_ptr<Records> records_;              ///< never null
  static std::atomic<int64_t> times_opened_, bytes_read_;
};

}  // namespace accelerate::formats
