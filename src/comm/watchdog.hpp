#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "accelerate/utils/nested.hpp"
#include "utils/thread_annotations.hpp"

namespace c10d {
class Store;
}

namespace accelerate::comm {

/// What a rank is doing in one group.
struct GroupStatus {
  std::string name;                ///< "group of all 4 ranks"
  int64_t sequence = 0;            ///< number of collectives begun
  std::string operation = "none";  ///< the last one begun
  bool inside = false;             ///< has not come back from it
  int64_t age_ms = 0;              ///< since it began (inside) or ended
  ACCELERATE_FIELDS(name, sequence, operation, inside, age_ms)
};

/// What a rank is doing, as it tells others when they ask.
struct RankStatus {
  std::map<std::string, GroupStatus> groups;  ///< by a key that all members of a group know it by
  std::string note;                           ///< "left" after a normal end, "failed: …" after an error, else empty
  int64_t round = 0;                          ///< the question that this answers
  ACCELERATE_FIELDS(groups, note, round)
};

/// One thread per process that answers peers' questions and hears of failures while the main thread computes or is
/// blocked. It talks through its own connection to the store; an idle group costs one small request per rank and
/// period.
class Watchdog {
 public:
  struct Callbacks {
    std::function<RankStatus()> status;                ///< called on the watchdog's thread
    std::function<void(std::string)> on_peer_failure;  ///< a peer called `announce_failure`, or the store is gone
  };

  Watchdog(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t world_size, Callbacks callbacks);
  /// Tells the peers that this rank left in peace unless a failure was announced.
  ~Watchdog();

  /// Tells all peers that this rank failed.
  void announce_failure(const std::string& reason) noexcept;
  /// Asks every peer what it is doing; nothing for one that did not answer in `patience`. `store_is_gone` is set when
  /// rank 0's store can't be reached.
  std::vector<std::optional<RankStatus>> ask_peers(std::chrono::milliseconds patience, bool& store_is_gone);

 private:
  void run();
  void publish(const RankStatus& status);
  void wait_for_leavers();

  c10::intrusive_ptr<c10d::Store> store_;
  const int64_t rank_;
  const int64_t world_size_;
  const Callbacks callbacks_;
  const std::chrono::milliseconds period_;
  std::atomic<bool> failed_{false};
  Mutex mutex_;
  std::condition_variable stop_changed_;
  bool stop_ ACCELERATE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace accelerate::comm
