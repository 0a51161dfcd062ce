#include "residency/spill_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <string>
#include <system_error>

#include "utils/raise.hpp"

namespace accelerate::residency {
namespace {

/// Extents begin and end on pages, so that room given back can be reused and freed as a whole.
int64_t in_pages(int64_t bytes) {
  constexpr int64_t kPage = 4096;
  return (bytes + kPage - 1) / kPage * kPage;
}

int open_without_name(const std::filesystem::path& directory) {
  const int file = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return file;
  auto name = (directory / "accelerate-spill-XXXXXX").string();  // a file system without O_TMPFILE
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

}  // namespace

SpillFile::SpillFile(std::filesystem::path directory, const Wording& wording)
    : directory_(std::move(directory)), wording_(wording) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(directory_, ignored))
    raise<ConfigError>("{}: found no folder '{}', expected an existing one on a disk with room for {}. Create it.",
                       wording_.user, directory_.string(), wording_.contents);
  file_ = open_without_name(directory_);
  if (file_ < 0) fail("making a file", 0, errno);
}

SpillFile::~SpillFile() { ::close(file_); }

void SpillFile::fail(const char* operation, int64_t bytes, int error) const {
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  const std::string advice =
      full ? fmt::format("The disk (or the quota, or the limit on file sizes) has no room for {}. Free some; {}.",
                         wording_.contents, wording_.advice)
           : "Check the folder's permissions and the disk.";
  raise<ResourceError>("{}: {} in '{}' failed for {} bytes beside the {} that the file has: {}. {}", wording_.user,
                       operation, directory_.string(), bytes, end_.load(), std::generic_category().message(error),
                       advice);
}

int64_t SpillFile::reserve(int64_t bytes) {
  bytes = in_pages(bytes);
  const MutexLock lock(mutex_);
  auto hole = holes_.begin();
  while (hole != holes_.end() && hole->second < bytes) ++hole;
  const bool reuse = hole != holes_.end();
  const int64_t offset = reuse ? hole->first : end_.load();
  if (::fallocate(file_, 0, offset, bytes) != 0 && errno != EOPNOTSUPP) fail("reserving room", bytes, errno);
  if (reuse) {
    const auto rest = hole->second - bytes;
    holes_.erase(hole);
    if (rest > 0) holes_.emplace(offset + bytes, rest);
  } else {
    end_ += bytes;
  }
  return offset;
}

void SpillFile::release(int64_t offset, int64_t bytes) noexcept {
  bytes = in_pages(bytes);
  const MutexLock lock(mutex_);
  try {
    auto hole = holes_.emplace(offset, bytes).first;
    if (const auto after = std::next(hole); after != holes_.end() && hole->first + hole->second == after->first) {
      hole->second += after->second;
      holes_.erase(after);
    }
    if (hole != holes_.begin())
      if (const auto before = std::prev(hole); before->first + before->second == hole->first) {
        before->second += hole->second;
        holes_.erase(hole);
        hole = before;
      }
    // Backward gives room back from the end, so cutting the file there frees the disk. Punching holes would write the
    // pages that it drops to the disk first.
    if (hole->first + hole->second == end_ && ::ftruncate(file_, hole->first) == 0) {
      end_ = hole->first;
      holes_.erase(hole);
    }
  } catch (const std::bad_alloc&) {
    // The room is lost until the file closes.
  }
}

void SpillFile::write(int64_t offset, const void* data, int64_t bytes) {
  const auto* next = static_cast<const char*>(data);
  for (int64_t left = bytes; left > 0;) {
    const auto done = ::pwrite(file_, next, static_cast<size_t>(left), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) fail("writing", bytes, done < 0 ? errno : ENOSPC);
    next += done, offset += done, left -= done;
  }
}

void SpillFile::read(int64_t offset, void* data, int64_t bytes) {
  auto* next = static_cast<char*>(data);
  for (int64_t left = bytes; left > 0;) {
    const auto done = ::pread(file_, next, static_cast<size_t>(left), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) fail("reading", bytes, done < 0 ? errno : EIO);
    next += done, offset += done, left -= done;
  }
}

void* SpillFile::map(int64_t offset, int64_t bytes) {
  // If room could not be promised, the file may still be shorter.
  {
    const MutexLock lock(mutex_);
    struct stat status {};
    if (::fstat(file_, &status) != 0 || (status.st_size < end_ && ::ftruncate(file_, end_) != 0))
      fail("making room", bytes, errno);
  }
  void* const memory = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file_,
                              static_cast<off_t>(offset));
  if (memory == MAP_FAILED) fail("mapping", bytes, errno);
  return memory;
}

}  // namespace accelerate::residency
