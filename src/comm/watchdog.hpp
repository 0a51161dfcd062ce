#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/utils/nested.hpp"

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
  int64_t history = 0;             ///< a sum over what it has begun so far: equal on ranks that are in step
  int64_t age_ms = 0;              ///< since it began (inside) or ended
  ACCELERATE_FIELDS(name, sequence, operation, inside, history, age_ms)
};

/// What a rank is doing, as it tells others when they ask.
struct RankStatus {
  std::map<std::string, GroupStatus> groups;  ///< by a key that all members of a group know it by
  std::string note;                           ///< "left" after a normal end, "failed: …" after an error, else empty
  int64_t round = 0;                          ///< the question that this answers
  ACCELERATE_FIELDS(groups, note, round)
};

/// What becomes of a question to the store, which rank 0's process serves.
enum class StoreState {
  answers,
  gone,   ///< the process has ended
  silent  ///< it does not answer in time: it is stopped, or its machine can't be reached
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

  /// @param timeout  of the store's calls
  /// @throws CommError when the store is gone
  Watchdog(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t world_size,
           std::chrono::milliseconds timeout, Callbacks callbacks);
  ~Watchdog() { leave(); }

  /// Stops, and tells the peers that this rank left in peace unless a failure was announced. Like all that asks the
  /// store here, it takes some seconds at most, also where the store does not answer. Once; later calls do nothing.
  void leave();

  /// Tells all peers that this rank failed.
  void announce_failure(const std::string& reason) noexcept;
  /// Asks every peer what it is doing; nothing for one that did not answer in `patience`.
  std::vector<std::optional<RankStatus>> ask_peers(std::chrono::milliseconds patience, StoreState& store);

 private:
  struct Talk;
  std::shared_ptr<Talk> talk_;  ///< shared with threads that nothing ends
};

}  // namespace accelerate::comm
