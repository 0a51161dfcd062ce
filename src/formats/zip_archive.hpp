#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "formats/input_file.hpp"
#include "utils/raise.hpp"

/// Zip archives of uncompressed records, as PyTorch writes them. Needs no LibTorch.
namespace accelerate::formats {

class ZipArchive {
 public:
  struct Bytes {
    int64_t begin = 0, size = 0;  ///< of the file
    int64_t header = 0;           ///< so many bytes before them say where they are
  };
  enum class Look {
    checks,
    peeks,  ///< InputFile::peek(): somebody checks all of that later
  };
  /// A record as the directory lists it.
  struct Entry {
    uint64_t header = 0, size = 0;  ///< of the archive
    uint32_t crc32 = 0;             ///< 0: whoever wrote it was told to leave checksums out
    bool stored = true;             ///< not compressed
  };

  /// Reads the directory. @param source  begins the messages @throws CheckpointError if these bytes are no archive
  ZipArchive(std::shared_ptr<const InputFile> file, int64_t offset, int64_t length, std::string source,
             Look look = Look::checks);

  /// By name, without the folder that all are in.
  const std::map<std::string, Entry>& entries() const { return entries_; }
  bool contains(const std::string& name) const { return entries_.contains(name); }
  /// @throws CheckpointError when it is not there or compressed, or reaches beyond the archive
  Bytes record(const std::string& name) const { return record(name, look_); }
  /// @param look  at its header
  Bytes record(const std::string& name, Look look) const;
  /// The text of a small record. @param most  a longer one is refused
  std::string text(const std::string& name, uint64_t most) const;
  /// Compares a record with the checksum that the directory has of it, reading a part at a time.
  /// @return whether it has one @throws CheckpointError where they differ
  bool check(const std::string& name) const;

  /// Bytes of the archive. @throws CheckpointError when it has fewer, or these are too many for memory
  std::string read(uint64_t begin, uint64_t size) const { return read(begin, size, look_); }
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    refuse(fmt::format(what, std::forward<Args>(args)...));
  }
  std::string read(uint64_t begin, uint64_t size, Look look) const;

  std::shared_ptr<const InputFile> file_;
  int64_t begin_;
  uint64_t length_;
  std::string source_;
  Look look_;
  std::map<std::string, Entry> entries_;
};

}  // namespace accelerate::formats
