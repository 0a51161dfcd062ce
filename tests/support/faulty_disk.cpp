#include "faulty_disk.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace support::faulty_disk {
namespace {

struct Disk {
  std::string root;
  int journal = -1;
  Fault fault = Fault::none;
  int64_t at = -1;
  std::function<void()> death;
  std::atomic<int64_t> calls{0};
  std::atomic<int64_t> removed{0};
  std::atomic<bool> armed{false}, halves{false};
};
Disk& disk() {
  static Disk one;
  return one;
}

template <class Function> Function real(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

std::string path_of(int handle) {
  std::array<char, PATH_MAX> path{};
  const auto length = ::readlink(("/proc/self/fd/" + std::to_string(handle)).c_str(), path.data(), path.size());
  return length > 0 ? std::string(path.data(), static_cast<size_t>(length)) : std::string();
}
std::string absolute(int folder, const char* path) {
  if (path[0] == '/') return path;
  const auto base = folder == AT_FDCWD ? fs::current_path().string() : path_of(folder);
  return (fs::path(base) / path).lexically_normal().string();
}
bool is_ours(const std::string& path) { return disk().armed && path.starts_with(disk().root); }
uint64_t number_of(const std::string& path) {
  struct stat facts {};
  return ::lstat(path.c_str(), &facts) == 0 ? facts.st_ino : 0;
}
std::string parent(const std::string& path) { return fs::path(path).parent_path().string(); }

void note(const std::string& line) {
  const auto text = line + "\n";
  static_cast<void>(::syscall(SYS_write, disk().journal, text.data(), text.size()));
}

/// One more call. @return whether its fault has come
bool comes(bool is_write, bool is_flush) {
  Disk& now = disk();
  const int64_t number = now.calls++;
  if (now.fault == Fault::none || now.at < 0 || number < now.at) return false;
  switch (now.fault) {
    case Fault::dies:
      if (number == now.at) now.death();
      return false;
    case Fault::writes_less:
      now.halves = true;
      return false;
    case Fault::no_flush:
      return is_flush && std::exchange(now.at, -1) >= 0;
    default:
      return is_write && std::exchange(now.at, -1) >= 0;
  }
}

/// Names that go away are kept, so that they can come back.
int take_away(const std::string& path, int (*remove)(const std::string&)) {
  comes(false, false);
  struct stat facts {};
  if (::lstat(path.c_str(), &facts) != 0 || S_ISDIR(facts.st_mode)) {
    const auto folder = number_of(parent(path)), number = number_of(path);
    const int result = remove(path);
    if (result == 0) note("D " + std::to_string(folder) + " " + path + " " + std::to_string(number));
    return result;
  }
  const auto kept = disk().root + "/../removed_" + std::to_string(::getpid()) + "_" + std::to_string(disk().removed++);
  if (::syscall(SYS_renameat2, AT_FDCWD, path.c_str(), AT_FDCWD, kept.c_str(), 0) != 0) return -1;
  note("U " + std::to_string(number_of(parent(path))) + " " + path + " " + kept);
  return 0;
}

int opened(int folder, const char* path, int flags, mode_t mode) {
  const bool creates = disk().armed && (flags & O_CREAT) != 0 && (flags & O_TMPFILE) != O_TMPFILE;
  const auto whole = creates ? absolute(folder, path) : std::string();
  const bool counts = creates && is_ours(whole), fresh = counts && number_of(whole) == 0;
  if (counts) comes(false, false);
  const int handle = static_cast<int>(::syscall(SYS_openat, folder, path, flags, mode));
  if (fresh && handle >= 0)
    note("C " + std::to_string(number_of(parent(whole))) + " " + whole + " " + std::to_string(number_of(whole)));
  return handle;
}

}  // namespace

void arm(const fs::path& root, const fs::path& journal, Fault fault, int64_t at, std::function<void()> death) {
  Disk& now = disk();
  now.root = root.string();
  now.journal = static_cast<int>(::syscall(SYS_openat, AT_FDCWD, journal.c_str(), O_WRONLY | O_APPEND | O_CREAT, 0666));
  now.fault = fault;
  now.at = at;
  now.death = std::move(death);
  now.calls = 0;
  now.halves = false;
  now.armed = true;
}

int64_t disarm() {
  Disk& now = disk();
  now.armed = false;
  ::close(now.journal);
  return now.calls;
}

int64_t cut_power(const fs::path& journal, uint64_t seed) {
  const auto is_lost = [seed](uint64_t number) { return (std::mt19937_64(seed ^ number)() & 1) != 0; };
  struct Change {
    char kind;
    uint64_t folder = 0;
    std::string path, other;
    bool is_durable = false;
  };
  std::vector<Change> names;
  std::map<uint64_t, bool> dirty;  // by number of the file
  std::ifstream in(journal);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    char kind = 0;
    uint64_t number = 0;
    words >> kind >> number;
    if (kind == 'W') dirty[number] = true;
    if (kind == 'S') {
      dirty[number] = false;
      for (auto& change : names) change.is_durable |= change.folder == number;
    }
    if (kind == 'W' || kind == 'S') continue;
    Change change{kind, number, {}, {}};
    words >> change.path >> change.other;
    if (kind == 'C') dirty.try_emplace(std::stoull(change.other), false);
    names.push_back(std::move(change));
  }
  int64_t taken_back = 0;
  std::vector<std::pair<std::string, std::string>> moved;  // by renames that stay, the first one first
  std::set<uint64_t> gone;
  const auto now = [&](std::string path) {
    for (const auto& [from, to] : moved)
      if (path == from || path.starts_with(from + "/")) path = to + path.substr(from.size());
    return path;
  };
  std::reverse(names.begin(), names.end());
  for (const auto& change : names) {
    if (gone.contains(change.folder)) continue;  // with all that was in it
    if (change.is_durable || !is_lost(change.folder)) {
      if (change.kind == 'D') gone.insert(std::stoull(change.other));
      if (change.kind == 'R') moved.insert(moved.begin(), {change.path, change.other});
      continue;
    }
    ++taken_back;
    std::error_code ignored;
    if (change.kind == 'C' || change.kind == 'M') fs::remove_all(now(change.path), ignored);
    if (change.kind == 'D') fs::create_directory(now(change.path), ignored);
    if (change.kind == 'U') fs::rename(change.other, now(change.path), ignored);
    if (change.kind == 'R') fs::rename(now(change.other), now(change.path), ignored);
  }
  std::error_code none;
  for (const auto& entry : fs::recursive_directory_iterator(journal.parent_path(), none))
    if (entry.is_regular_file())
      if (const auto found = dirty.find(number_of(entry.path().string()));
          found != dirty.end() && found->second && is_lost(found->first)) {
        fs::resize_file(entry.path(), fs::file_size(entry.path()) / 2);
        ++taken_back;
      }
  fs::remove(journal);
  return taken_back;
}

}  // namespace support::faulty_disk

// ---- the calls

using namespace support::faulty_disk;

/// Also for the C++ library's, which are the linker's to find.
#define CALL extern "C" __attribute__((visibility("default")))

CALL ssize_t write(int handle, const void* bytes, size_t count) {
  if (!disk().armed || handle <= 2) return ::syscall(SYS_write, handle, bytes, count);
  const auto path = path_of(handle);
  if (!is_ours(path)) return ::syscall(SYS_write, handle, bytes, count);
  if (comes(true, false)) return errno = disk().fault == Fault::eio ? EIO : ENOSPC, -1;
  if (disk().halves) count = std::max<size_t>(1, count / 2);
  note("W " + std::to_string(number_of(path)));
  return ::syscall(SYS_write, handle, bytes, count);
}

CALL ssize_t pwrite(int handle, const void* bytes, size_t count, off_t at) {
  const auto path = disk().armed ? path_of(handle) : std::string();
  if (!is_ours(path)) return ::syscall(SYS_pwrite64, handle, bytes, count, at);
  if (comes(true, false)) return errno = disk().fault == Fault::eio ? EIO : ENOSPC, -1;
  if (disk().halves) count = std::max<size_t>(1, count / 2);
  note("W " + std::to_string(number_of(path)));
  return ::syscall(SYS_pwrite64, handle, bytes, count, at);
}

CALL int fsync(int handle) {
  const auto path = disk().armed ? path_of(handle) : std::string();
  if (!is_ours(path) && !(disk().armed && path == parent(disk().root)))
    return static_cast<int>(::syscall(SYS_fsync, handle));
  if (comes(false, true)) return errno = EIO, -1;
  note("S " + std::to_string(number_of(path)));
  return 0;  // nobody cuts the power of this machine
}

CALL int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : mode_t{};
  va_end(rest);
  return opened(AT_FDCWD, path, flags, mode);
}
CALL int open64(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : mode_t{};
  va_end(rest);
  return opened(AT_FDCWD, path, flags, mode);
}

CALL int mkdir(const char* path, mode_t mode) noexcept {
  const auto whole = disk().armed ? absolute(AT_FDCWD, path) : std::string();
  if (is_ours(whole)) comes(false, false);
  const int result = static_cast<int>(::syscall(SYS_mkdir, path, mode));
  if (is_ours(whole) && result == 0) note("M " + std::to_string(number_of(parent(whole))) + " " + whole);
  return result;
}

CALL int rename(const char* from, const char* to) noexcept {
  const auto source = disk().armed ? absolute(AT_FDCWD, from) : std::string();
  if (!is_ours(source)) return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
  const auto target = absolute(AT_FDCWD, to);
  comes(false, false);
  // A file that gives way can come back.
  const auto folder = number_of(parent(target));
  struct stat facts {};
  if (::lstat(to, &facts) == 0 && S_ISREG(facts.st_mode)) {
    const auto kept =
        disk().root + "/../removed_" + std::to_string(::getpid()) + "_" + std::to_string(disk().removed++);
    if (::link(to, kept.c_str()) == 0) note("U " + std::to_string(folder) + " " + target + " " + kept);
  }
  const int result = static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
  if (result == 0) note("R " + std::to_string(folder) + " " + source + " " + target);
  return result;
}

CALL int unlink(const char* path) noexcept {
  const auto whole = disk().armed ? absolute(AT_FDCWD, path) : std::string();
  const auto remove = [](const std::string& one) { return static_cast<int>(::syscall(SYS_unlink, one.c_str())); };
  return is_ours(whole) ? take_away(whole, remove) : remove(path);
}
CALL int rmdir(const char* path) noexcept {
  const auto whole = disk().armed ? absolute(AT_FDCWD, path) : std::string();
  const auto remove = [](const std::string& one) { return static_cast<int>(::syscall(SYS_rmdir, one.c_str())); };
  return is_ours(whole) ? take_away(whole, remove) : remove(path);
}
CALL int remove(const char* path) noexcept {
  struct stat facts {};
  return ::lstat(path, &facts) == 0 && S_ISDIR(facts.st_mode) ? ::rmdir(path) : ::unlink(path);
}
CALL int unlinkat(int folder, const char* path, int flags) noexcept {
  const auto whole = disk().armed ? absolute(folder, path) : std::string();
  if (!is_ours(whole)) return static_cast<int>(::syscall(SYS_unlinkat, folder, path, flags));
  return (flags & AT_REMOVEDIR) != 0 ? ::rmdir(whole.c_str()) : ::unlink(whole.c_str());
}
