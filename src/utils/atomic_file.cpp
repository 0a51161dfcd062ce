#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

namespace accelerate {
namespace {

std::filesystem::path temporary_name(const std::filesystem::path& path) {
  static std::atomic<int> counter{0};
  return path.parent_path() / fmt::format(".{}.tmp-{}-{}", path.filename().string(), ::getpid(), counter++);
}

bool is_full(int error) { return error == ENOSPC || error == EDQUOT || error == EFBIG; }

/// Of the folder that a file is in, behind an error that says that it is full.
std::string room_beside(const std::filesystem::path& path) {
  const auto free = free_bytes(path.has_parent_path() ? path.parent_path() : ".");
  return free ? fmt::format("; its disk has {} bytes free", *free) : "";
}

[[noreturn]] void fail_at(const std::string& operation, const std::filesystem::path& path, const std::string& what) {
  const int error = errno;
  const auto message = fmt::format("{} '{}': {}: {}", operation, path.string(), what, std::strerror(error));
  if (is_full(error))
    raise<ResourceError>("{}{}. Free some space or raise the limit; an older file of this name is untouched.", message,
                         room_beside(path));
  raise<CheckpointError>(
      "{}. Check that its folder exists and may be written to; an older file of this name is untouched.", message);
}

/// New names survive a power cut only when their folder is flushed too.
void flush_folder(const std::string& operation, const std::filesystem::path& folder) {
  flush_to_disk(operation, folder.empty() ? "." : folder);
}

/// The one that lives.
struct RecordedNow {
  std::mutex mutex;
  RecordedFiles* files = nullptr;
};
RecordedNow& recording() {
  static RecordedNow one;
  return one;
}

}  // namespace

void flush_to_disk(const std::string& operation, const std::filesystem::path& path) {
  const int handle = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (handle < 0 && errno == EACCES) return;  // who may write to a folder need not be allowed to list it
  const int failed = handle < 0 || ::fsync(handle) != 0 ? errno : 0;
  if (handle >= 0) ::close(handle);
  if (failed == 0 || (handle >= 0 && (failed == EINVAL || failed == ENOTSUP || failed == ENOSYS || failed == EROFS)))
    return;
  const auto message =
      fmt::format("{} '{}': can't flush it to the disk: {}", operation, path.string(), std::strerror(failed));
  if (is_full(failed)) raise<ResourceError>("{}{}. Free some space or raise the limit.", message, room_beside(path));
  raise<CheckpointError>("{}. What was written there may be lost: look at the disk, and save elsewhere.", message);
}

std::optional<int64_t> free_bytes(const std::filesystem::path& folder) {
  struct statvfs facts {};
  if (::statvfs(folder.c_str(), &facts) != 0 || facts.f_blocks == 0) return std::nullopt;
  // Some blocks are the superuser's alone.
  const auto blocks = ::geteuid() == 0 ? facts.f_bfree : facts.f_bavail;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(blocks, facts.f_frsize, &bytes)) return std::nullopt;
  return bytes;
}

RecordedFiles::RecordedFiles(const std::filesystem::path& folder)
    : folder_(std::filesystem::absolute(folder).lexically_normal()) {
  const std::lock_guard lock(recording().mutex);
  recording().files = this;
}

RecordedFiles::~RecordedFiles() {
  const std::lock_guard lock(recording().mutex);
  recording().files = nullptr;
}

namespace {

/// From the folder; empty for a file elsewhere.
std::string name_within(const std::filesystem::path& folder, const std::filesystem::path& file) {
  const auto name = std::filesystem::absolute(file).lexically_normal().lexically_relative(folder);
  return name.empty() || *name.begin() == ".." ? std::string() : name.generic_string();
}

}  // namespace

bool RecordedFiles::wants(const std::filesystem::path& file) {
  const std::lock_guard lock(recording().mutex);
  return recording().files && !name_within(recording().files->folder_, file).empty();
}

void RecordedFiles::add(const std::filesystem::path& file, FileChecksums sums) {
  const std::lock_guard lock(recording().mutex);
  if (!recording().files) return;
  if (auto name = name_within(recording().files->folder_, file); !name.empty())
    recording().files->files_.emplace_back(std::move(name), std::move(sums));
}

namespace {

AtomicFile*& written_here() {
  thread_local AtomicFile* one = nullptr;
  return one;
}

}  // namespace

AtomicFile::AtomicFile(std::string operation, const std::filesystem::path& path)
    : operation_(std::move(operation)), path_(path), temporary_(temporary_name(path)), outer_(written_here()) {
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file_ < 0) fail("can't create it");
  if (RecordedFiles::wants(path_)) sums_.emplace();
  written_here() = this;
}

AtomicFile::~AtomicFile() {
  if (written_here() == this) written_here() = outer_;
  for (auto& one : going_) one.wait();
  if (direct_ >= 0) ::close(direct_);
  if (file_ >= 0) ::close(file_);
  if (!finished_) ::unlink(temporary_.c_str());
}

namespace {

/// @return an errno, or 0
int write_all(int direct, int file, const char* bytes, size_t count, int64_t at) {
  int handle = direct >= 0 ? direct : file;
  while (count > 0) {
    const auto written = ::pwrite(handle, bytes, count, at);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EINVAL &&
        handle != file) {  // what is left, or the file system after all, wants the cache
      handle = file;
      continue;
    }
    if (written < 0) return errno;
    bytes += written;
    count -= static_cast<size_t>(written);
    at += written;
  }
  return 0;
}

}  // namespace

void AtomicFile::write(std::string_view bytes) {
  if (sums_) sums_->add(bytes);
  while (!bytes.empty()) {
    auto& buffer = buffers_[filling_];
    constexpr size_t kBlock = 4096;  // what disks and file systems want addresses to be multiples of
    if (!buffer) buffer.reset(static_cast<char*>(std::aligned_alloc(kBlock, kBufferBytes)));
    if (!buffer) raise<ResourceError>("{} '{}': no memory for {} bytes", operation_, path_.string(), kBufferBytes);
    const size_t now = std::min(bytes.size(), kBufferBytes - filled_);
    std::memcpy(buffer.get() + filled_, bytes.data(), now);
    filled_ += now;
    bytes.remove_prefix(now);
    if (filled_ == kBufferBytes) send();
  }
}

void AtomicFile::make_room_here() {
  // What is being filled may fill up, and go, while another one is on its way: the third one takes the rest.
  if (auto* const file = written_here()) file->settle(1);
}

/// Begins to write what has been gathered.
void AtomicFile::send() {
  settle(buffers_.size() - 2);
  if (sent_ == 0) direct_ = ::open(temporary_.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC);
  // Where no thread is to be had it is done when it is waited for.
  going_.push_back(std::async(std::launch::async | std::launch::deferred, write_all, direct_, file_,
                              buffers_[filling_].get(), filled_, sent_));
  sent_ += static_cast<int64_t>(std::exchange(filled_, 0));
  filling_ = (filling_ + 1) % buffers_.size();
}

void AtomicFile::settle(size_t buffers) {
  while (going_.size() > buffers) {
    errno = going_.front().get();
    going_.pop_front();
    if (errno != 0) fail_writing(kBufferBytes);
  }
}

void AtomicFile::finish(bool flush) {
  settle(0);
  if (filled_ > 0) {
    errno = write_all(-1, file_, buffers_[filling_].get(), filled_, sent_);
    if (errno != 0) fail_writing(filled_);
  }
  if (direct_ >= 0) ::close(std::exchange(direct_, -1));
  if (flush && ::fsync(file_) != 0) fail("can't flush it to the disk");
  if (::close(std::exchange(file_, -1)) != 0) fail("can't close it");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("can't rename the finished file");
  finished_ = true;
  if (sums_) RecordedFiles::add(path_, sums_->take());
  if (flush) flush_folder(operation_, path_.parent_path());
}

void AtomicFile::fail(const std::string& what) const { fail_at(operation_, path_, what); }
void AtomicFile::fail_writing(size_t bytes) const {
  fail(is_full(errno) ? fmt::format("can't write {} more bytes to it", bytes) : "can't write to it");
}

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
  flush_folder(operation_, folder_);
}

}  // namespace accelerate
