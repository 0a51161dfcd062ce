#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

namespace accelerate {
namespace {

std::filesystem::path temporary_name(const std::filesystem::path& path) {
  static std::atomic<int> counter{0};
  return path.parent_path() / fmt::format(".{}.tmp-{}-{}", path.filename().string(), ::getpid(), counter++);
}

}  // namespace

AtomicFile::AtomicFile(std::string operation, const std::filesystem::path& path)
    : operation_(std::move(operation)), path_(path), temporary_(temporary_name(path)) {
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file_ < 0) fail("can't create it");
}

AtomicFile::~AtomicFile() {
  if (file_ >= 0) ::close(file_);
  if (!finished_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const auto written = ::write(file_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("can't write to it");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

void AtomicFile::finish(bool flush) {
  if (flush && ::fsync(file_) != 0) fail("can't flush it to the disk");
  if (::close(std::exchange(file_, -1)) != 0) fail("can't close it");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("can't rename the finished file");
  finished_ = true;
  if (!flush) return;
  // The new name survives a power cut only when the folder is flushed too. Not every file system can, and the file is
  // complete without.
  const auto folder = path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
  if (const int handle = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); handle >= 0) {
    ::fsync(handle);
    ::close(handle);
  }
}

void AtomicFile::fail(const std::string& what) const {
  const int error = errno;
  const auto message = fmt::format("{} '{}': {}: {}.", operation_, path_.string(), what, std::strerror(error));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG)
    raise<ResourceError>("{} Free some space or raise the limit; an older file of this name is untouched.", message);
  raise<CheckpointError>(
      "{} Check that its folder exists and may be written to; an older file of this name is untouched.", message);
}

}  // namespace accelerate
