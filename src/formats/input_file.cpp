#include "formats/input_file.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <list>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "input/read_file.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::formats {

struct InputFile::Descriptor {
  explicit Descriptor(int file) : file(file) {}
  ~Descriptor() { ::close(file); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int file;
};

/// The open files of the process, those that were read last in front.
struct InputFile::OpenFiles {
  using Entry = std::pair<const InputFile*, std::shared_ptr<const Descriptor>>;
  Mutex mutex;
  std::list<Entry> recent ACCELERATE_GUARDED_BY(mutex);
  std::unordered_map<const InputFile*, std::list<Entry>::iterator> places ACCELERATE_GUARDED_BY(mutex);

  static size_t most() {
    struct rlimit limit {};
    constexpr rlim_t kFewest = 8, kMost = 4096;
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kFewest;
    return std::clamp(limit.rlim_cur / 2, kFewest, kMost);
  }
};

/// Those that are to be checked, by their first bytes.
struct InputFile::Records {
  std::atomic<bool> any{false};
  Mutex mutex;
  std::map<int64_t, std::shared_ptr<const ZipRecord>> by_begin ACCELERATE_GUARDED_BY(mutex);

  std::vector<std::shared_ptr<const ZipRecord>> within(int64_t begin, int64_t end) {
    std::vector<std::shared_ptr<const ZipRecord>> found;
    const MutexLock lock(mutex);
    auto at = by_begin.upper_bound(begin);
    if (at != by_begin.begin()) --at;
    for (; at != by_begin.end() && at->first < end; ++at)
      if (at->second->end() > begin) found.push_back(at->second);
    return found;
  }
};

/// The part of an expected file that was read last for some of its bytes. Those that come next often lie in it, too:
/// small tensors, and where one ends and the next begins.
struct InputFile::LastPart {
  Mutex mutex;
  const InputFile* file ACCELERATE_GUARDED_BY(mutex) = nullptr;
  int64_t begin ACCELERATE_GUARDED_BY(mutex) = 0;
  std::string bytes ACCELERATE_GUARDED_BY(mutex);
};

std::atomic<int64_t> InputFile::times_opened_{0}, InputFile::bytes_read_{0};

InputFile::OpenFiles& InputFile::open_files() {
  static auto& only = *new OpenFiles;  // tensors that read from files may end after everything else
  return only;
}

InputFile::LastPart& InputFile::last_part() {
  static auto& only = *new LastPart;
  return only;
}

std::shared_ptr<const InputFile::Descriptor> InputFile::open_anew() const {
  const auto opened = open_regular(path_);
  if (opened.file < 0)
    raise<CheckpointError>(
        "can't read '{}': {}. Check the path and the rights; a checkpoint must be copied with all of its files.",
        path_.string(), opened.problem);
  times_opened_.fetch_add(1, std::memory_order_relaxed);
  return std::make_shared<const Descriptor>(opened.file);
}

std::shared_ptr<const InputFile::Descriptor> InputFile::opened() const {
  auto& all = open_files();
  {
    const MutexLock lock(all.mutex);
    if (const auto found = all.places.find(this); found != all.places.end()) {
      all.recent.splice(all.recent.begin(), all.recent, found->second);
      return found->second->second;
    }
  }
  auto descriptor = open_anew();
  struct stat facts {};
  if (::fstat(descriptor->file, &facts) != 0 || facts.st_dev != device_ || facts.st_ino != inode_ ||
      facts.st_size != size_)
    raise<CheckpointError>(
        "reading '{}': another file of {} bytes is in the place of the one of {} that was opened before; a checkpoint "
        "must stay as it is while it is read.",
        path_.string(), static_cast<int64_t>(facts.st_size), size_);
  keep(descriptor);
  return descriptor;
}

void InputFile::keep(const std::shared_ptr<const Descriptor>& descriptor) const {
  auto& all = open_files();
  std::list<OpenFiles::Entry> closed;  // without the lock
  const MutexLock lock(all.mutex);
  if (all.places.contains(this)) return;  // another thread was first
  all.recent.emplace_front(this, descriptor);
  all.places.emplace(this, all.recent.begin());
  const size_t most = OpenFiles::most();
  while (all.recent.size() > most) {
    all.places.erase(all.recent.back().first);
    closed.splice(closed.begin(), all.recent, std::prev(all.recent.end()));
  }
}

InputFile::InputFile(const std::filesystem::path& path) : path_(path), records_(std::make_unique<Records>()) {
  const auto descriptor = open_anew();
  struct stat facts {};
  if (::fstat(descriptor->file, &facts) != 0)
    raise<CheckpointError>("can't read '{}': {}.", path.string(), std::strerror(errno));
  size_ = facts.st_size, device_ = facts.st_dev, inode_ = facts.st_ino;
  char begin[64];
  const auto got = ::pread(descriptor->file, begin, sizeof begin, 0);
  if (const auto problem = git_lfs_problem({begin, static_cast<size_t>(std::max<ssize_t>(got, 0))}); !problem.empty())
    raise<CheckpointError>("can't read '{}': {}.", path.string(), problem);
  expected_ = ExpectedFiles::find(path_);
  if (expected_) expected_->check_size(size_);
  keep(descriptor);
}

InputFile::InputFile(std::string name, std::string bytes)
    : path_(std::move(name)),
      bytes_(std::move(bytes)),
      in_memory_(true),
      size_(static_cast<int64_t>(bytes_.size())),
      records_(std::make_unique<Records>()) {}

InputFile::~InputFile() {
  if (in_memory_) return;
  {
    auto& last = last_part();
    const MutexLock lock(last.mutex);
    if (last.file == this) last.file = nullptr;
  }
  auto& all = open_files();
  const MutexLock lock(all.mutex);
  const auto found = all.places.find(this);
  if (found == all.places.end()) return;
  all.recent.erase(found->second);
  all.places.erase(found);
}

int InputFile::duplicate() const {
  const auto descriptor = in_memory_ ? nullptr : opened();
  return ::fcntl(descriptor ? descriptor->file : -1, F_DUPFD_CLOEXEC, 0);
}

void InputFile::read(int64_t offset, void* data, int64_t count) const {
  if (expected_) return read_by_parts(offset, static_cast<char*>(data), count);
  read_unchecked(offset, data, count);
  check_records(offset, count, static_cast<const char*>(data));
}

void InputFile::check(int64_t offset, int64_t count) const {
  if (expected_) read_by_parts(offset, nullptr, count);
  else check_records(offset, count, nullptr);
}

void InputFile::check_records(int64_t offset, int64_t count, const char* data) const {
  if (!records_->any.load(std::memory_order_relaxed)) return;
  std::string part;
  const auto bytes_at = [&](int64_t begin, int64_t bytes) -> std::string_view {
    if (data && begin >= offset && begin + bytes <= offset + count)
      return {data + (begin - offset), static_cast<size_t>(bytes)};
    part.resize(static_cast<size_t>(bytes));
    read_unchecked(begin, part.data(), bytes);
    return part;
  };
  for (const auto& record : records_->within(offset, offset + count)) record->check(path_.string(), bytes_at);
}

bool InputFile::expect_record(const std::string& name, int64_t begin, int64_t bytes, uint32_t crc32) const {
  const MutexLock lock(records_->mutex);
  auto& all = records_->by_begin;
  const auto next = all.upper_bound(begin);
  if (next != all.end() && next->first < begin + bytes) return false;
  if (next != all.begin()) {
    const auto& before = *std::prev(next)->second;
    if (before.begin() == begin) return before.end() == begin + bytes;
    if (before.end() > begin) return false;
  }
  all.emplace(begin, std::make_shared<const ZipRecord>(name, begin, bytes, crc32));
  records_->any.store(true, std::memory_order_relaxed);
  return true;
}

// Part by part, so that a checksum is computed while the processor's cache still has the bytes.
void InputFile::read_by_parts(int64_t offset, char* to, int64_t count) const {
  while (count > 0) {
    const auto part = expected_->part_at(offset);
    const int64_t now = std::min(count, part.end() - offset);
    if (now <= 0) {  // behind the end
      if (to) read_unchecked(offset, to, count);
      return;
    }
    if (to && now == part.bytes) {
      read_unchecked(offset, to, now);
      expected_->check(offset, now, [to](int64_t, int64_t bytes) {
        return crc32c::of({to, static_cast<size_t>(bytes)});
      });
    } else if (!expected_->is_checked(part)) {
      read_as_last_part(part, offset, to, now);
    } else if (to && !take_from_last_part(offset, to, now)) {
      read_unchecked(offset, to, now);
    }
    if (to) to += now;
    offset += now, count -= now;
  }
}

bool InputFile::take_from_last_part(int64_t offset, char* to, int64_t count) const {
  auto& last = last_part();
  const MutexLock lock(last.mutex);
  const int64_t at = offset - last.begin;
  if (last.file != this || at < 0 || at + count > static_cast<int64_t>(last.bytes.size())) return false;
  std::memcpy(to, last.bytes.data() + at, static_cast<size_t>(count));
  return true;
}

void InputFile::read_as_last_part(const ExpectedFile::Part& part, int64_t offset, char* to, int64_t count) const {
  auto& last = last_part();
  std::string bytes;  // another thread may read another one meanwhile
  {
    const MutexLock lock(last.mutex);
    last.file = nullptr;
    bytes.swap(last.bytes);
  }
  bytes.resize(static_cast<size_t>(part.bytes));
  read_unchecked(part.begin, bytes.data(), part.bytes);
  expected_->check(part.begin, part.bytes, [&](int64_t, int64_t) { return crc32c::of(bytes); });
  if (to) std::memcpy(to, bytes.data() + (offset - part.begin), static_cast<size_t>(count));
  const MutexLock lock(last.mutex);
  last.file = this;
  last.begin = part.begin;
  last.bytes = std::move(bytes);
}

void InputFile::read_unchecked(int64_t offset, void* data, int64_t count) const {
  const auto descriptor = in_memory_ ? nullptr : opened();
  // Who goes through a file some MB at a time finds the next ones there; the system by itself looks 128 KB ahead.
  constexpr int64_t kMuch = int64_t{1} << 20, kAhead = int64_t{16} << 20;
  if (descriptor && count >= kMuch && read_to_.exchange(offset + count, std::memory_order_relaxed) == offset)
    ::posix_fadvise(descriptor->file, offset, count + kAhead, POSIX_FADV_WILLNEED);
  auto* to = static_cast<char*>(data);
  while (count > 0) {
    const auto got = !descriptor ? static_cast<int64_t>(bytes_.copy(to, static_cast<size_t>(count),
                                                                    static_cast<size_t>(std::min(offset, size_))))
                                 : ::pread(descriptor->file, to, static_cast<size_t>(count), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) raise<CheckpointError>("reading '{}' at byte {}: {}.", path_.string(), offset, std::strerror(errno));
    if (got == 0)
      raise<CheckpointError>(
          "reading '{}': it ends at byte {}, where {} more were expected. It is truncated: copy it again, or save "
          "again.",
          path_.string(), offset, count);
    to += got, offset += got, count -= got;
    if (descriptor) bytes_read_.fetch_add(got, std::memory_order_relaxed);
  }
}

}  // namespace accelerate::formats
