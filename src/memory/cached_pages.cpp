#include "memory/cached_pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace accelerate {

CachedPages::CachedPages(int file, const std::filesystem::path& path) {
  struct stat status {};
  // For a file that one may not write, mincore says that all of it is there.
  if (::faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) != 0 || ::fstat(file, &status) != 0 || status.st_size < 1)
    return;
  void* const mapping = ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_SHARED, file, 0);
  if (mapping != MAP_FAILED) mapping_ = mapping, size_ = status.st_size;
}

CachedPages::~CachedPages() {
  if (mapping_) ::munmap(mapping_, static_cast<size_t>(size_));
}

bool CachedPages::hold(int64_t begin, int64_t bytes) const {
  static const int64_t page = ::sysconf(_SC_PAGESIZE);
  const int64_t first = begin / page * page, end = std::min(begin + bytes, size_);
  if (!mapping_ || first >= end) return false;
  std::vector<unsigned char> there(static_cast<size_t>((end - first + page - 1) / page));
  return ::mincore(static_cast<char*>(mapping_) + first, static_cast<size_t>(end - first), there.data()) == 0 &&
         std::all_of(there.begin(), there.end(), [](unsigned char one) { return (one & 1) != 0; });
}

}  // namespace accelerate
