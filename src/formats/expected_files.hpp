#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/utils/export.hpp"
#include "utils/file_checksums.hpp"
#include "utils/raise.hpp"

/// Files whose bytes are known beforehand: a checkpoint's, which its manifest lists. Needs no LibTorch.
namespace accelerate::formats {

/// Bytes of a file that are not those that were written.
class ACCELERATE_API DamagedFile : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
};

/// Runs `read`, and says of damage that it meets what the bytes are: "tensor 'weight'".
template <class Read> auto naming_damage(std::string_view what, const Read& read) {
  try {
    return read();
  } catch (const DamagedFile& damage) {
    raise<DamagedFile>("{}: {}", what, damage.what());
  }
}

/// One of them, as all who have it open know it.
class ExpectedFile {
 public:
  ExpectedFile(std::string path, FileChecksums sums, int64_t part_bytes);

  /// What has a checksum of its own.
  struct Part {
    int64_t index = 0, begin = 0, bytes = 0;
    int64_t end() const { return begin + bytes; }
  };
  /// The one that this byte of the file lies in; without bytes behind the file's end.
  Part part_at(int64_t byte) const;
  bool is_checked(const Part& part) const;

  /// @throws DamagedFile if the file has another size
  void check_size(int64_t bytes) const;
  /// Checks the parts that the bytes from `begin` lie in, each once in the life of this object. Safe to use from
  /// several threads. @param sum_of  of so many bytes of the file from there  @throws DamagedFile
  void check(int64_t begin, int64_t count, const std::function<uint32_t(int64_t begin, int64_t bytes)>& sum_of) const;
  int64_t parts_checked() const { return parts_checked_.load(std::memory_order_relaxed); }

 private:
  std::string path_;
  FileChecksums sums_;
  int64_t part_bytes_;
  mutable std::vector<std::atomic<bool>> is_checked_;
  mutable std::atomic<int64_t> parts_checked_{0};
};

/// A record of a zip, which carries its own checksum.
class ZipRecord {
 public:
  /// @param begin, bytes  of the file
  ZipRecord(std::string name, int64_t begin, int64_t bytes, uint32_t crc32)
      : name_(std::move(name)), begin_(begin), bytes_(bytes), crc32_(crc32) {}

  int64_t begin() const { return begin_; }
  int64_t end() const { return begin_ + bytes_; }
  /// Checks it, once in the life of this object. Safe to use from several threads. @param file  for messages
  /// @param read  gives so many bytes of the file from there  @throws DamagedFile
  void check(const std::string& file, const std::function<std::string_view(int64_t begin, int64_t bytes)>& read) const;

 private:
  std::string name_;
  int64_t begin_, bytes_;
  uint32_t crc32_;
  mutable std::atomic<bool> is_checked_{false};
};

/// While one lives, an InputFile of which nothing is expected gives no bytes of a record but those that the zip's
/// directory has the checksum of.
class CheckedRecords {
 public:
  CheckedRecords();
  ~CheckedRecords();
  CheckedRecords(const CheckedRecords&) = delete;
  CheckedRecords& operator=(const CheckedRecords&) = delete;

  static bool wanted();
  /// In this process, since this began.
  int64_t checked() const;

 private:
  int64_t before_;
};

/// While it lives, an InputFile of one of these files has the size that is expected, and gives no bytes that are not:
/// it looks at the parts that are asked for. One at a time in a process.
class ExpectedFiles {
 public:
  /// @param files  by their paths from the folder
  ExpectedFiles(const std::filesystem::path& folder, const std::map<std::string, FileChecksums>& files,
                int64_t part_bytes);
  ~ExpectedFiles();
  ExpectedFiles(const ExpectedFiles&) = delete;
  ExpectedFiles& operator=(const ExpectedFiles&) = delete;

  /// Null for a file of which nothing is known.
  static std::shared_ptr<const ExpectedFile> find(const std::filesystem::path& file);
  /// In this process so far.
  int64_t parts_checked() const;

 private:
  std::map<std::string, std::shared_ptr<const ExpectedFile>> by_path_;
};

}  // namespace accelerate::formats
