#include "comm/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/comm.hpp"
#include "comm/group.hpp"
#include "utils/environment.hpp"
#include "utils/log.hpp"

namespace accelerate::comm {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes can share only lock-free atomics");

std::string first_line(const char* file) {
  std::string line;
  std::ifstream in(file);
  std::getline(in, line);
  return line;
}

/// Equal for processes that can open each other's files by /proc: one kernel since its start, one name space of process
/// numbers, one user.
std::string host_identity() {
  char space[64] = {};
  if (::readlink("/proc/self/ns/pid", space, sizeof(space) - 1) < 0) return {};
  const std::string boot = first_line("/proc/sys/kernel/random/boot_id");
  return boot.empty() ? std::string() : boot + " " + space + " " + std::to_string(::geteuid());
}

/// In bytes; 0 when the system does not say.
size_t available_memory() {
  std::ifstream in("/proc/meminfo");
  for (std::string name, unit; in >> name;) {
    size_t kib = 0;
    if (!(in >> kib)) break;
    if (name == "MemAvailable:") return kib * 1024;
    std::getline(in, unit);
  }
  return 0;
}

std::string error_text(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

/// Closes at the end of a scope.
struct File {
  ~File() {
    if (fd >= 0) ::close(fd);
  }
  int fd = -1;
};

/// @return a text when it failed.
std::string make_file(File& file, size_t bytes, size_t likely) {
  const size_t available = available_memory();
  if (available > 0 && likely > available)
    return std::to_string(likely) + " bytes are more than the " + std::to_string(available) + " that are free";
  file.fd = ::memfd_create("accelerate", MFD_CLOEXEC);
  if (file.fd < 0) return error_text("memfd_create");
  if (::ftruncate(file.fd, static_cast<off_t>(bytes)) != 0) return error_text("ftruncate");
  return {};
}

}  // namespace

std::shared_ptr<SharedMemory> SharedMemory::create(const std::shared_ptr<Group>& group, size_t bytes,
                                                   std::optional<size_t> likely) {
  if (!group || group->dry() || !group->device().is_cpu() ||
      static_cast<size_t>(group->world_size()) * sizeof(Arrival) > kHeader)
    return nullptr;
  const bool wanted = environment::flag("ACCELERATE_SHARED_MEMORY").value_or(true);
  const auto hosts = all_gather_bytes(*group, wanted ? host_identity() : std::string());
  for (const auto& host : hosts)
    if (host.empty() || host != hosts.front()) return nullptr;

  const size_t length = bytes + kHeader;
  File file;
  std::string failed, where;
  if (group->rank() == 0) {
    failed = make_file(file, length, likely.value_or(bytes) + kHeader);
    if (failed.empty()) where = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(file.fd);
  }
  where = broadcast_bytes(*group, where, 0);
  void* base = MAP_FAILED;
  if (!where.empty()) {
    if (group->rank() != 0 && (file.fd = ::open(where.c_str(), O_RDWR | O_CLOEXEC)) < 0)
      failed = error_text("open of rank 0's memory");
    if (failed.empty() &&
        (base = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0)) == MAP_FAILED)
      failed = error_text("mmap");
  }
  // Rank 0's file must stay open until all have mapped it, and either all use it or none.
  const auto failures = all_gather_bytes(*group, failed);
  for (size_t rank = 0; rank < failures.size(); ++rank) {
    if (failures[rank].empty()) continue;
    if (base != MAP_FAILED) ::munmap(base, length);
    if (group->rank() == 0)
      logs::warn(
          "accelerate.comm",
          "ranks of this host communicate through sockets instead of shared memory, because rank {} can't have it: {}",
          rank, failures[rank]);
    return nullptr;
  }
  std::vector<int64_t> pids;
  for (const auto& pid : all_gather_bytes(*group, std::to_string(::getpid()))) pids.push_back(std::stoll(pid));
  group->watch_processes(std::move(pids));
  return std::shared_ptr<SharedMemory>(new SharedMemory(group, static_cast<char*>(base), length));
}

SharedMemory::~SharedMemory() { ::munmap(base_, length_); }

void SharedMemory::barrier(const char* operation) {
  const uint64_t mine = ++barriers_;
  arrivals()[group_->rank()].count.store(mine, std::memory_order_release);
  group_->wait_until(operation, [&] {
    for (int64_t rank = 0; rank < group_->world_size(); ++rank)
      if (arrivals()[rank].count.load(std::memory_order_acquire) < mine) return false;
    return true;
  });
}

}  // namespace accelerate::comm
