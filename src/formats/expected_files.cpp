#include "formats/expected_files.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

namespace accelerate::formats {
namespace {

namespace fs = std::filesystem;

std::string key_of(const fs::path& file) { return fs::absolute(file).lexically_normal().string(); }

/// The one that lives.
struct Expecting {
  std::mutex mutex;
  const ExpectedFiles* files = nullptr;
};
Expecting& expecting() {
  static Expecting one;
  return one;
}

}  // namespace

ExpectedFile::ExpectedFile(std::string path, FileChecksums sums, int64_t part_bytes)
    : path_(std::move(path)), sums_(std::move(sums)), part_bytes_(part_bytes), is_checked_(sums_.parts.size()) {}

ExpectedFile::Part ExpectedFile::part_at(int64_t byte) const {
  const int64_t index = byte / part_bytes_, begin = index * part_bytes_;
  return {index, begin, std::clamp<int64_t>(sums_.bytes - begin, 0, part_bytes_)};
}

bool ExpectedFile::is_checked(const Part& part) const {
  return is_checked_[static_cast<size_t>(part.index)].load(std::memory_order_relaxed);
}

void ExpectedFile::check_size(int64_t bytes) const {
  if (bytes != sums_.bytes)
    raise<DamagedFile>(
        "'{}' has {} bytes, expected the {} that were written. Copy it again, or load an older checkpoint.", path_,
        bytes, sums_.bytes);
}

void ExpectedFile::check(int64_t begin, int64_t count,
                         const std::function<uint32_t(int64_t begin, int64_t bytes)>& sum_of) const {
  if (count <= 0) return;
  for (int64_t part = begin / part_bytes_; part * part_bytes_ < std::min(begin + count, sums_.bytes); ++part) {
    const auto index = static_cast<size_t>(part);
    if (is_checked_[index].load(std::memory_order_relaxed)) continue;
    const int64_t from = part * part_bytes_, bytes = std::min(part_bytes_, sums_.bytes - from);
    if (const auto found = sum_of(from, bytes); found != sums_.parts[index])
      raise<DamagedFile>(
          "'{}' is damaged: bytes {} to {} have the checksum {:08x}, and {:08x} when they were written. Copy it again, "
          "or load an older checkpoint.",
          path_, from, from + bytes - 1, found, sums_.parts[index]);
    is_checked_[index].store(true, std::memory_order_relaxed);
    parts_checked_.fetch_add(1, std::memory_order_relaxed);
  }
}

ExpectedFiles::ExpectedFiles(const fs::path& folder, const std::map<std::string, FileChecksums>& files,
                             int64_t part_bytes) {
  for (const auto& [name, sums] : files) {
    const auto path = folder / name;
    by_path_.emplace(key_of(path), std::make_shared<const ExpectedFile>(path.string(), sums, part_bytes));
  }
  const std::lock_guard lock(expecting().mutex);
  expecting().files = this;
}

ExpectedFiles::~ExpectedFiles() {
  const std::lock_guard lock(expecting().mutex);
  expecting().files = nullptr;
}

std::shared_ptr<const ExpectedFile> ExpectedFiles::find(const fs::path& file) {
  const std::lock_guard lock(expecting().mutex);
  if (!expecting().files) return nullptr;
  const auto& all = expecting().files->by_path_;
  const auto found = all.find(key_of(file));
  return found == all.end() ? nullptr : found->second;
}

int64_t ExpectedFiles::parts_checked() const {
  int64_t parts = 0;
  for (const auto& [path, file] : by_path_) parts += file->parts_checked();
  return parts;
}

namespace {
std::atomic<int64_t> records_wanted{0}, records_checked{0};
}

void ZipRecord::check(const std::string& file,
                      const std::function<std::string_view(int64_t begin, int64_t bytes)>& read) const {
  if (is_checked_.load(std::memory_order_relaxed)) return;
  uint32_t state = ~uint32_t{0};
  for (int64_t at = 0; at < bytes_; at += kChecksumPartBytes)
    state = crc32::extend(state, read(begin_ + at, std::min(kChecksumPartBytes, bytes_ - at)));
  if (~state != crc32_)
    raise<DamagedFile>(
        "'{}' is damaged: its record '{}', bytes {} to {}, has the checksum {:08x}, and {:08x} when it was written. "
        "Copy "
        "it again, or load an older checkpoint.",
        file, name_, begin_, end() - 1, ~state, crc32_);
  is_checked_.store(true, std::memory_order_relaxed);
  records_checked.fetch_add(1, std::memory_order_relaxed);
}

CheckedRecords::CheckedRecords() : before_(records_checked.load()) { ++records_wanted; }
CheckedRecords::~CheckedRecords() { --records_wanted; }
bool CheckedRecords::wanted() { return records_wanted.load(std::memory_order_relaxed) > 0; }
int64_t CheckedRecords::checked() const { return records_checked.load() - before_; }

}  // namespace accelerate::formats
