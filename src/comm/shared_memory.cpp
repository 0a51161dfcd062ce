#include "comm/shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/comm.hpp"
#include "accelerate/utils/error.hpp"
#include "comm/comms_log.hpp"
#include "comm/group.hpp"
#include "memory/available.hpp"
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
  const auto available = available_memory();
  if (available && likely > static_cast<size_t>(*available))
    return std::to_string(likely) + " bytes are more than the " + std::to_string(*available) + " that are free";
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

namespace {

template <size_t N> void set_text(char (&to)[N], const char* text) {
  std::strncpy(to, text, N - 1);
  to[N - 1] = '\0';
}

}  // namespace

/// Looks whether all ranks wait, each in a place where nobody of the others is, and goes on waiting: then nobody can
/// help anybody. Counts looks, never time, so that a rank that was stopped is not taken for one that waits.
class SharedMemory::Deadlock {
 public:
  explicit Deadlock(SharedMemory& memory) : memory_(memory) {}

  /// Once a poll. @return what to tell people, once it is sure
  std::string look() {
    const int64_t ranks = memory_.group_->world_size();
    for (int64_t rank = 0; rank < ranks; ++rank)
      if (memory_.arrivals()[rank].stuck.load(std::memory_order_acquire)) return text();
    if (++polls_ % kEvery != 0) return {};
    std::vector<uint64_t> places, polls;
    bool all_wait = true;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      places.push_back(memory_.arrivals()[rank].place.load(std::memory_order_acquire));
      polls.push_back(memory_.arrivals()[rank].polls.load(std::memory_order_relaxed));
      all_wait &= places.back() != 0;
    }
    if (!all_wait || places != places_) {
      places_ = std::move(places), polls_then_ = std::move(polls);
      return {};
    }
    for (size_t rank = 0; rank < polls.size(); ++rank)
      if (polls[rank] - polls_then_[rank] < kSure) return {};
    memory_.arrivals()[memory_.group_->rank()].stuck.store(true, std::memory_order_release);  // all hear of it at once
    return text();
  }

 private:
  std::string text() const {
    const int64_t ranks = memory_.group_->world_size();
    std::string text = "no rank can go on:";
    for (int64_t rank = 0; rank < ranks; ++rank)
      text += (rank ? ", rank " : " rank ") +
              std::to_string(memory_.group_->global_ranks()[static_cast<size_t>(rank)]) + " waits in '" +
              memory_.arrivals()[rank].waits_for + "'";
    return text +
           "; all ranks must run the same forwards, backwards and steps in the same order: look for control "
           "flow that depends on the rank or on its data";
  }

  // A poll that has waited for some time comes 250 us after the last one, or later.
  static constexpr uint64_t kEvery = 1000, kSure = 8000;
  SharedMemory& memory_;
  uint64_t polls_ = 0;
  std::vector<uint64_t> places_, polls_then_;
};

void SharedMemory::wait(const char* operation, const std::function<bool()>& done, bool in_step) {
  Arrival& mine = arrivals()[group_->rank()];
  set_text(mine.waits_for, operation);
  mine.place.store(++waits_, std::memory_order_release);
  struct Leave {
    std::atomic<uint64_t>& place;
    ~Leave() { place.store(0, std::memory_order_release); }
  } const leave{mine.place};
  Deadlock deadlock(*this);
  const auto look = [&] {
    if (done()) return true;
    mine.polls.fetch_add(1, std::memory_order_relaxed);
    if (const std::string text = deadlock.look(); !text.empty()) throw CommError(std::string(operation) + ": " + text);
    return false;
  };
  group_->wait_until(operation, look, in_step);
}

/// Comes to the next meeting, and waits until all have.
void SharedMemory::come_to(uint64_t number, const char* operation) {
  arrivals()[group_->rank()].count.store(number, std::memory_order_release);
  wait(operation, [&] {
    for (int64_t rank = 0; rank < group_->world_size(); ++rank)
      if (arrivals()[rank].count.load(std::memory_order_acquire) < number) return false;
    return true;
  });
}

size_t SharedMemory::exchange_bytes(int64_t ranks) {
  return 2 * static_cast<size_t>(ranks) * (most_to_exchange() + sizeof(uint64_t));
}

std::vector<std::string> SharedMemory::exchange(const char* operation, std::string_view bytes) {
  const LoggedScope logged(Collective::all_gather, static_cast<int64_t>(bytes.size()), *group_);
  const uint64_t number = ++meetings_;
  // Two take turns, see Arrival.
  const auto place = [&](int64_t rank) {
    const auto index = static_cast<size_t>(group_->world_size()) * (number % 2) + static_cast<size_t>(rank);
    return data() + index * (most_to_exchange() + sizeof(uint64_t));
  };
  const uint64_t length = bytes.size();
  std::memcpy(place(group_->rank()), &length, sizeof length);
  std::memcpy(place(group_->rank()) + sizeof length, bytes.data(), bytes.size());
  come_to(number, operation);
  std::vector<std::string> all;
  for (int64_t rank = 0; rank < group_->world_size(); ++rank) {
    uint64_t theirs = 0;
    std::memcpy(&theirs, place(rank), sizeof theirs);
    all.emplace_back(place(rank) + sizeof theirs, std::min<uint64_t>(theirs, most_to_exchange()));
  }
  return all;
}

SharedMemory::Heard SharedMemory::meet(const char* operation, const Said& mine) {
  const LoggedScope logged(Collective::barrier, 0, *group_);
  const uint64_t number = ++meetings_;
  const auto said_by = [&](int64_t rank) -> Arrival::Meeting& { return arrivals()[rank].meetings[number % 2]; };
  said_by(group_->rank()).flag.store(mine.flag, std::memory_order_relaxed);
  said_by(group_->rank()).digest.store(mine.digest, std::memory_order_relaxed);
  set_text(said_by(group_->rank()).operation, operation);
  come_to(number, operation);
  Heard heard{.any = false, .alike = true};
  bool same = true;
  for (int64_t rank = 0; rank < group_->world_size(); ++rank) {
    heard.any |= said_by(rank).flag.load(std::memory_order_relaxed);
    heard.alike &= said_by(rank).digest.load(std::memory_order_relaxed) == mine.digest;
    same &= std::strcmp(said_by(rank).operation, said_by(0).operation) == 0;
  }
  if (same) return heard;
  std::string text = std::string(operation) + ": ranks have come to one meeting from different places:";
  for (int64_t rank = 0; rank < group_->world_size(); ++rank)
    text += (rank ? ", rank " : " rank ") + std::to_string(group_->global_ranks()[static_cast<size_t>(rank)]) +
            " from '" + said_by(rank).operation + "'";
  throw CommError(text +
                  "; all ranks must run the same forwards, backwards and steps in the same order: look for "
                  "control flow that depends on the rank or on its data");
}

}  // namespace accelerate::comm
