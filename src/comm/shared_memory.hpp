#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::comm {

class Group;

/// Memory that all ranks of a group map, where all of them run on one host and compute on the CPU. It has no name: the
/// kernel frees it with the last process, however that ends. Begins zeroed; the first `kHeader` bytes are the
/// barrier's.
class SharedMemory {
 public:
  /// Collective. Null on all ranks when they are not on one host, when ACCELERATE_SHARED_MEMORY=0 says so on any rank,
  /// or when the memory can't be had (rank 0 warns and says why).
  /// @param bytes   the same on all ranks. Memory is taken page by page, when a page is first written to.
  /// @param likely  how many of them will be written to; so many must be free now. All, if it is not given.
  static std::shared_ptr<SharedMemory> create(const std::shared_ptr<Group>& group, size_t bytes,
                                              std::optional<size_t> likely = std::nullopt);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  /// `bytes` of them, aligned to a page.
  char* data() const { return base_ + kHeader; }

  /// Waits for all ranks, microseconds after the last one has come. Collective. @throws CommError as every wait of the
  /// group, and on all ranks when they come for different operations.
  void barrier(const char* operation) { meet(operation, {}); }
  /// The words of one rank at a meeting.
  struct Said {
    bool flag = false;
    uint64_t digest = 0;
  };
  struct Heard {
    bool any;    ///< somebody's flag is set
    bool alike;  ///< all digests are equal
  };
  /// The same as barrier(); all hear what all say.
  Heard meet(const char* operation, const Said& mine);
  /// Each rank's bytes, by rank. Collective; not beside data(), of which it takes exchange_bytes().
  /// @param bytes  of any length up to most_to_exchange()
  std::vector<std::string> exchange(const char* operation, std::string_view bytes);
  /// The bytes to create() for that.
  static size_t exchange_bytes(int64_t ranks);
  static constexpr size_t most_to_exchange() { return 16384 - sizeof(uint64_t); }

  /// Polls `done`, for which peers do something meanwhile; `done` may do its own share. @throws CommError as every wait
  /// of the group, and on all ranks when each waits for something else. @param in_step  see Group::wait_until()
  void wait(const char* operation, const std::function<bool()>& done, bool in_step = true);

 private:
  static constexpr size_t kHeader = 4 * 4096;
  /// The message of a rank to the others. Two meetings take turns, because a fast rank may have come to the next one
  /// before a slow one has looked at this.
  struct alignas(64) Arrival {
    struct Meeting {
      std::atomic<uint64_t> digest;
      std::atomic<bool> flag;
      char operation[31];
    };
    std::atomic<uint64_t> count;  ///< of meetings; set last
    Meeting meetings[2];
    std::atomic<uint64_t> place, polls;  ///< of waits: which one (0: in none), and how often it has looked
    std::atomic<bool> stuck;             ///< it has seen that nobody can go on
    char waits_for[32];
  };
  SharedMemory(std::shared_ptr<Group> group, char* base, size_t length)
      : group_(std::move(group)), base_(base), length_(length) {}
  void come_to(uint64_t number, const char* operation);
  Arrival* arrivals() const { return reinterpret_cast<Arrival*>(base_); }

  std::shared_ptr<Group> group_;
  char* base_;
  size_t length_;
  class Deadlock;
  uint64_t meetings_ = 0, waits_ = 0;
};

}  // namespace accelerate::comm
