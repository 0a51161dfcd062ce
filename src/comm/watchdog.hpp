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

/// A collective that was begun.
struct Begun {
  std::string operation;
  int64_t history = 0;  ///< a sum over this one and all before: equal on ranks that are in step
  ACCELERATE_FIELDS(operation, history)
};

/// The status of a rank in one group.
struct GroupStatus {
  std::string name;           ///< "group of all 4 ranks"
  int64_t sequence = 0;       ///< number of collectives begun
  std::vector<Begun> recent;  ///< the last ones begun; the number of the last of them is `sequence`
  bool inside = false;        ///< has not come back from the last one
  int64_t age_ms = 0;         ///< since it began (inside) or ended
  int64_t next = -1;          ///< the member after this rank, in a ring; -1: compares with nobody
  ACCELERATE_FIELDS(name, sequence, recent, inside, age_ms, next)

  std::string operation() const { return recent.empty() ? "none" : recent.back().operation; }
  /// Null: not begun, or long ago.
  const Begun* begun(int64_t number) const;
};

/// The status of a rank, as it tells others when they ask.
struct RankStatus {
  std::map<std::string, GroupStatus> groups;  ///< by a key that all members of a group know it by
  std::string note;                           ///< "left" after a normal end, "failed: …" after an error, else empty
  int64_t round = 0;                          ///< the question that this answers
  ACCELERATE_FIELDS(groups, note, round)
};

/// Why the wait of `mine` in the group `key` never ends, because its member `rank` has begun other collectives there or
/// has left; empty: nothing says so. Ranks that are in step, or late, give no reason.
std::string disagreement(const std::string& key, const GroupStatus& mine, int64_t rank, const RankStatus& theirs);

/// The result of a question to the store, which rank 0's process serves.
enum class StoreState {
  answers,
  gone,   ///< the process has ended
  silent  ///< it does not answer in time: it is stopped, or its machine can't be reached
};

/// One thread per process that answers peers' questions and hears of failures while the main thread computes or is
/// blocked, and that finds out whether what it is blocked in can end. It talks through its own connection to the store;
/// an idle group costs one small request per rank and period, one that waits some more.
class Watchdog {
 public:
  struct Callbacks {
    std::function<RankStatus()> status;  ///< called on the watchdog's thread
    /// A peer called `announce_failure`, or does not do what this rank waits for, or the store is gone.
    std::function<void(std::string)> on_peer_failure;
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

  /// See Group.
  void call_ranks();
  void answer_calls(std::function<int64_t()> how_far);
  std::optional<int64_t> furthest() const;

  /// Asks every peer what it is doing; nothing for one that did not answer in `patience`.
  std::vector<std::optional<RankStatus>> ask_peers(std::chrono::milliseconds patience, StoreState& store);

 private:
  struct Talk;
  std::shared_ptr<Talk> talk_;  ///< shared with threads that nothing ends
};

}  // namespace accelerate::comm
