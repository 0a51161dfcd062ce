#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace accelerate {
namespace {

std::filesystem::path temporary_name(const std::filesystem::path& path) {
  static std::atomic<int> counter{0};
  return path.parent_path() / fmt::format(".{}.tmp-{}-{}", path.filename().string(), ::getpid(), counter++);
}

[[noreturn]] void fail_at(const std::string& operation, const std::filesystem::path& path, const std::string& what) {
  const int error = errno;
  const auto message = fmt::format("{} '{}': {}: {}.", operation, path.string(), what, std::strerror(error));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG)
    raise<ResourceError>("{} Free some space or raise the limit; an older file of this name is untouched.", message);
  raise<CheckpointError>(
      "{} Check that its folder exists and may be written to; an older file of this name is untouched.", message);
}

/// New names survive a power cut only when their folder is flushed too. Not every file system can, and the files are
/// complete without.
void flush_folder(const std::filesystem::path& folder) {
  if (const int handle = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); handle >= 0) {
    ::fsync(handle);
    ::close(handle);
  }
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
  if (flush) flush_folder(path_.has_parent_path() ? path_.parent_path() : ".");
}

void AtomicFile::fail(const std::string& what) const { fail_at(operation_, path_, what); }

AtomicFiles::AtomicFiles(std::string operation, const std::filesystem::path& folder)
    : operation_(std::move(operation)), folder_(folder), temporary_((folder / ".unfinished-XXXXXX").string()) {
  if (!::mkdtemp(temporary_.data())) fail_at(operation_, folder_, "can't create a folder in it");
}

AtomicFiles::~AtomicFiles() {
  std::error_code ignored;
  std::filesystem::remove_all(temporary_, ignored);
}

std::filesystem::path AtomicFiles::place(const std::string& name) {
  names_.push_back(name);
  return std::filesystem::path(temporary_) / name;
}

void AtomicFiles::finish() {
  if (names_.empty()) return;
  if (const auto last = folder_ / names_.back(); names_.size() > 1 && ::unlink(last.c_str()) != 0 && errno != ENOENT)
    fail_at(operation_, last, "can't replace it");
  for (const auto& name : names_)
    if (::rename((std::filesystem::path(temporary_) / name).c_str(), (folder_ / name).c_str()) != 0)
      fail_at(operation_, folder_ / name, "can't rename the finished file");
  flush_folder(folder_);
}

}  // namespace accelerate
