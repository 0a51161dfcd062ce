#pragma once

#include <cstdint>
#include <filesystem>

namespace accelerate {

/// Which parts of a file the system holds in memory. Answers are of the moment, for choosing between ways to read.
class CachedPages {
 public:
  /// @param file  open for reading; may be closed afterwards. @param path  of the same file.
  CachedPages(int file, const std::filesystem::path& path);
  CachedPages(const CachedPages&) = delete;
  CachedPages& operator=(const CachedPages&) = delete;
  ~CachedPages();

  /// Whether all of these bytes are there. False where the system does not say, as of files that others own.
  bool hold(int64_t begin, int64_t bytes) const;

 private:
  void* mapping_ = nullptr;  ///< of the whole file, only for asking: nothing reads there
  int64_t size_ = 0;
};

}  // namespace accelerate
