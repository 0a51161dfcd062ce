#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "residency/buffers.hpp"
#include "residency/chain.hpp"
#include "residency/pins.hpp"
#include "residency/trace.hpp"
#include "residency/unit.hpp"
#include "utils/thread_annotations.hpp"

namespace accelerate::residency {

struct Policy {
  /// All that comes before a unit comes again: the rest of a forward, or of a backward.
  static constexpr int64_t kWholePass = std::numeric_limits<int64_t>::max();

  /// Units fetched ahead of their touch, as the trace predicts them.
  int64_t prefetch = 1;
  /// Once units of so many bytes have been fetched ahead and not been touched, no further one is; 0: none at all.
  std::optional<int64_t> prefetch_bytes;
  /// Fetches that nobody has touched yet, at most.
  int64_t outstanding = 2;
  /// Bytes of units present or on their way; more only where one operator needs more.
  std::optional<int64_t> budget_bytes;
  /// A unit goes as soon as another one is touched, unless it is expected back within `reuse_distance` touches.
  bool evict_after_use = false;
  int64_t reuse_distance = 1;
  /// Instead of `reuse_distance`: unless it comes back after units of at most so many bytes.
  std::optional<int64_t> reuse_bytes;
  /// Units that go are wanted again before they change, see Home::keep_for_backward(): from forward to backward.
  bool keep_for_backward = false;
  /// The model lies on several devices: an operator's operands come to its unit's device (see devices.hpp), of units
  /// that never move too. Decided once, when the Residency is made.
  bool across_devices = false;
  /// Homes are encoded ones, of one member each: operators on these are answered from their codes (encoded.hpp).
  /// Decided once, when the Residency is made.
  bool encoded = false;
};

/// The units of one model: who is where, who comes next, who has to go. All decisions follow from the order of touches
/// alone, never from time, so that ranks that run the same program make the same ones. Thread-safe; with collective
/// homes all threads of a rank together must touch in the order of the other ranks.
///
///     absent --touch, prefetch--> fetching --touch--> resident --policy--> absent      (a unit pinned by an operator
///     stays)
class Residency {
 public:
  explicit Residency(const Policy& policy);
  ~Residency();
  Residency(const Residency&) = delete;
  Residency& operator=(const Residency&) = delete;

  /// Takes the tensors over; they are absent from now on, unless their home is mapped. `keep`: see Unit::keep().
  Unit& add(const std::string& name, std::vector<PartSpec> parts, bool keep = false);
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }

  /// Makes the unit present and keeps it so until unpin(). Blocks. @throws what its home throws; the unit is absent
  /// then. @param foretells  this says what is wanted next, in this pass and in the next one: others are fetched ahead
  void pin(Unit& unit, bool writes, bool foretells = true);
  void unpin(Unit& unit);
  /// Pins a unit whose bytes are to be reached without operators.
  void begin_raw_access(Unit& unit, bool writeback);
  /// Unpins it, and makes it absent: what was changed is stored, or lost.
  void end_raw_access(Unit& unit, bool writeback);

  // Bytes that other processes compute with. A writer, by operators or around them, gets a copy of its own.
  bool has_private() const;
  /// The elements of its copies that this process decides go to where all see them, and the copies end. The caller has
  /// seen to it that nobody computes meanwhile.
  void share_again();
  void share_again(Unit& unit);  ///< of one unit
  /// The function that brings the values that all ranks see up to date, once each has written to its own shards, or to
  /// the masters of shared images; collective. It ends with note_up_to_date().
  void set_publisher(std::function<void()> publish) { publish_ = std::move(publish); }
  /// Told of each write by an operator to a member, with what the whole member is now, as this rank has it (1-D).
  void set_scribe(std::function<void(const Member&, const at::Tensor&)> scribe) { scribe_ = std::move(scribe); }
  bool has_scribe() const { return static_cast<bool>(scribe_); }
  /// Called before what a unit's homes keep is compared with its image, for writes that no version of a tensor counts.
  void set_watcher(std::function<void(const Unit&)> watch) { watch_ = std::move(watch); }
  /// Called, with the lock held, when after a unit another one was touched than the recorded order foretold. Before
  /// the first touch.
  using Surprise = std::function<void(const Unit& after, const Unit& expected, const Unit& found)>;
  void set_surprise(Surprise surprise) { surprise_ = std::move(surprise); }
  void look_at_homes(const Unit& unit) const {
    if (watch_) watch_(unit);
  }
  void note_up_to_date();
  /// Before an operator touches the member.
  void bring_up_to_date(Unit& unit, const Member& member);
  /// A rank has written to its own slice.
  void note_piece_write(Unit& unit);
  /// For code that gives members other values than operators do, all ranks together.
  struct Change {
    std::function<void()> begin, end;  ///< collective
  };
  void set_change(Change change) { change_ = std::move(change); }
  const Change& change() const { return change_; }
  /// Between the two: the member's home keeps what it keeps of `value`, which has the member's sizes and any dtype.
  void assign(const Member& member, const at::Tensor& value);
  /// From here on writes go to the shared bytes: everyone writes to its own slice only.
  void write_together(bool on) { writing_together_.store(on, std::memory_order_relaxed); }
  bool writes_together() const { return writing_together_.load(std::memory_order_relaxed); }

  // Members whose home keeps values of its own, while their unit is pinned.
  /// Its elements in the home's dtype, those that the home keeps as exact as they are there.
  at::Tensor exact(const Member& member) const;
  /// An operator has written to the member. @param values  instead of it, if defined: what exact() gave, changed
  void wrote(Member& member, const at::Tensor& values = {});

  /// Fetches what the trace expects next (BACKWARD_POST; otherwise each touch does it).
  void prefetch_next();
  /// Makes the unit absent now, unless it is pinned.
  void evict(Unit& unit);
  /// Makes all absent that are not pinned, and forgets where the program stood and what homes kept: values may change
  /// now.
  void release();

  /// As the policy with which it was made says.
  bool across_devices() const { return devices_.has_value(); }
  Policy policy() const;
  /// All of it but `across_devices`.
  void set_policy(const Policy& policy);
  int64_t surprises() const;

  /// Until units have been touched in some order: they will be in the order in which they were added.
  void expect_order_of_addition();

  /// Frees the memory that waits for the next unit of its size.
  void trim();
  /// Bytes that never go have been moved to the host, or back (PutAway): members of those that are elsewhere are
  /// absent, and code that asks for them is told `absent`.
  void follow_moves(std::string (*absent)(const std::string& name));

  /// The first member whose tensor was replaced behind our back (module->to(...)); null when there is none.
  const Member* replaced_member() const;

 private:
  void start(Unit& unit) ACCELERATE_REQUIRES(mutex_);
  void finish(Unit& unit) ACCELERATE_REQUIRES(mutex_);
  void drop(Unit& unit) ACCELERATE_REQUIRES(mutex_);
  bool out_of_date(const Unit& unit) const ACCELERATE_REQUIRES(mutex_);
  void make_private(Unit& unit, bool of_ours_too = false) ACCELERATE_REQUIRES(mutex_);
  void share(Unit& unit, bool keep) ACCELERATE_REQUIRES(mutex_);
  void try_drop(Unit& unit) ACCELERATE_REQUIRES(mutex_);
  bool comes_back_soon(const Unit& unit) const ACCELERATE_REQUIRES(mutex_);
  void arrive(Unit& unit) ACCELERATE_REQUIRES(mutex_);
  void make_room(int64_t bytes) ACCELERATE_REQUIRES(mutex_);
  void look_ahead(int64_t units) ACCELERATE_REQUIRES(mutex_);

  std::function<void()> publish_;
  std::function<void(const Member&, const at::Tensor&)> scribe_;
  std::function<void(const Unit&)> watch_;
  Surprise surprise_;
  Change change_;
  std::atomic<bool> writing_together_{false};
  std::optional<ProcessHandler> devices_;     ///< of a model across devices
  std::optional<ProcessHandler> encoded_;     ///< of weights in few bits
  std::vector<std::unique_ptr<Unit>> units_;  ///< all there before anybody touches one
  mutable Mutex mutex_;                       ///< of what follows, and of what the units and their parts hold
  Policy policy_ ACCELERATE_GUARDED_BY(mutex_);
  Buffers buffers_ ACCELERATE_GUARDED_BY(mutex_);
  Trace trace_ ACCELERATE_GUARDED_BY(mutex_);
  Unit* current_ ACCELERATE_GUARDED_BY(mutex_) = nullptr;  ///< last touched unit
  int64_t outstanding_ ACCELERATE_GUARDED_BY(mutex_) = 0;  ///< units in state fetching
  int64_t present_bytes_ ACCELERATE_GUARDED_BY(mutex_) = 0;
  int64_t clock_ ACCELERATE_GUARDED_BY(mutex_) = 0;  ///< touches
};

}  // namespace accelerate::residency
