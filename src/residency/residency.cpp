#include "residency/residency.hpp"

#include <ATen/ops/empty_strided.h>

#include <algorithm>

#include "accelerate/utils/error.hpp"
#include "memory/meta_memory.hpp"
#include "observe/trace.hpp"
#include "residency/counters.hpp"
#include "residency/devices.hpp"
#include "residency/encoded.hpp"
#include "snapshot/ledger.hpp"

namespace accelerate::residency {
namespace {

/// Homes compute and communicate with plain tensors.
struct PlainTensors {
  OwnOperators own{TorchLayers::no_gradients};
};

}  // namespace

Residency::Residency(const Policy& policy) : policy_(policy) {
  install_fallback();
  if (policy.across_devices) devices_.emplace(Link::devices, devices_handler());
  if (policy.encoded) encoded_.emplace(Link::codes, encoded_handler());
}

Residency::~Residency() {
  for (auto& unit : units_) {
    for (auto& part : unit->parts_) {
      part.transfer.reset();
      if (part.flat.defined()) counters().add_resident(-part.resident_bytes());
    }
  }
}

Unit& Residency::add(const std::string& name, std::vector<PartSpec> parts, bool keep) {
  const MutexLock lock(mutex_);
  auto unit = std::make_unique<Unit>(*this, static_cast<int32_t>(units_.size()), name, keep);
  bool all_mapped = true;
  for (auto& spec : parts) {
    unit->parts_.emplace_back();
    Part& part = unit->parts_.back();
    part.numel = spec.layout.numel;
    part.dtype = spec.dtype;
    part.device = spec.device;
    part.home = std::move(spec.home);
    part.absent = spec.absent;
    if (auto mapped = part.home->mapped()) part.mapped = std::move(*mapped);
    all_mapped &= part.mapped.defined();
  }
  // Bytes that are always there need no fault, except to show that nothing depends on that, or where writes to them are
  // more than that.
  unit->fixed_ = all_mapped && !paranoid_flag();
  for (const auto& part : unit->parts_) unit->has_image_ |= unit->fixed_ && part.home->keeps().has_value();
  unit->writes_through_ = std::all_of(unit->parts_.begin(), unit->parts_.end(), [](const Part& part) {
    return part.home->keeps() || part.home->own().length > 0;
  });
  for (size_t p = 0; p < parts.size(); ++p) {
    const Home& home = *unit->parts_[p].home;
    const bool faults = !unit->fixed_ || home.keeps() || home.own().length > 0 || across_devices();
    for (size_t i = 0; i < parts[p].members.size(); ++i)
      unit->parts_[p].members.push_back(std::make_unique<Member>(*unit, unit->parts_[p], parts[p].members[i].first,
                                                                 parts[p].members[i].second, parts[p].layout.offsets[i],
                                                                 faults));
    if (parts[p].slice_is_last) unit->parts_[p].members.back()->set_slice();
  }
  for (const auto& part : unit->parts_)
    for (const auto& member : part.members) member->set_encoded(part.home->encoded());
  units_.push_back(std::move(unit));
  Unit& added = *units_.back();
  if (added.fixed_) {
    start(added);
    finish(added);
  }
  return added;
}

void Residency::pin(Unit& unit, bool writes, bool foretells) {
  const MutexLock lock(mutex_);
  counters().touches.fetch_add(1, std::memory_order_relaxed);
  unit.last_use_ = ++clock_;
  ++unit.pins_;
  try {
    // A rank's use of bytes that are open to it is its own affair, and foretells nothing of what all ranks touch.
    if (foretells && &unit != current_ && unit.open_ == 0) arrive(unit);
    if (unit.state_ != State::absent && unit.pins_ == 1 && out_of_date(unit)) drop(unit);
    if (unit.state_ != State::resident) {
      if (unit.state_ == State::absent) {
        counters().faults.fetch_add(1, std::memory_order_relaxed);
        start(unit);
      } else {
        counters().prefetch_hits.fetch_add(1, std::memory_order_relaxed);
      }
      // The next ones travel while we wait for this one, and while it is computed with.
      if (foretells) look_ahead(policy_.prefetch);
      finish(unit);
    }
    if (writes) make_private(unit);
  } catch (...) {
    --unit.pins_;
    throw;
  }
  unit.dirty_ |= writes && !unit.writes_through_;
}

/// Whether its homes' values have changed since it was filled.
bool Residency::out_of_date(const Unit& unit) const {
  return !unit.fixed_ && !unit.private_ && std::any_of(unit.parts_.begin(), unit.parts_.end(), [](const Part& part) {
    return part.home->version() != part.version;
  });
}

/// Before something writes: others compute with these bytes.
void Residency::make_private(Unit& unit, bool of_ours_too) {
  if (unit.private_ || writes_together()) return;
  const PlainTensors plain;
  for (auto& part : unit.parts_) {
    if (!part.mapped.defined() || (part.home->own().length == 0 && !of_ours_too)) continue;
    at::Tensor copy = buffers_.take(part.numel, part.dtype, part.device);
    copy.copy_(part.mapped);
    counters().add_resident(part.bytes() - part.resident_bytes());
    part.flat = std::move(copy);
    for (auto& member : part.members) member->move(part.flat.mutable_data_ptr());
    unit.private_ = true;
  }
}

void Residency::share(Unit& unit, bool keep) {
  if (!unit.private_) return;
  const PlainTensors plain;
  for (auto& part : unit.parts_) {
    if (!part.mapped.defined() || part.flat.is_same(part.mapped)) continue;
    if (const auto [begin, length] = part.home->own(); keep) {
      const at::Tensor own = part.mapped.narrow(0, begin, length);
      snapshot::keep(own);
      own.copy_(part.flat.narrow(0, begin, length));
    }
    counters().add_resident(part.resident_bytes() - part.bytes());
    buffers_.give(std::exchange(part.flat, part.mapped));
    for (auto& member : part.members) member->move(part.flat.mutable_data_ptr());
  }
  unit.private_ = false;
}

bool Residency::has_private() const {
  const MutexLock lock(mutex_);
  return std::any_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->private_; });
}

void Residency::share_again() {
  const MutexLock lock(mutex_);
  for (auto& unit : units_) share(*unit, /*keep=*/true);
}

void Residency::share_again(Unit& unit) {
  const MutexLock lock(mutex_);
  share(unit, /*keep=*/true);
}

void Residency::assign(const Member& member, const at::Tensor& value) {
  const MutexLock lock(mutex_);
  const PlainTensors plain;
  const at::Tensor& like = member.tensor();
  at::Tensor ordered = value;
  if (!like.is_non_overlapping_and_dense()) ordered = value.contiguous();
  else if (value.strides() != like.strides())
    ordered = at::empty_strided(like.sizes(), like.strides(), value.options()).copy_(value);
  ordered = ordered.as_strided({ordered.numel()}, {1});  // in the order of the member's bytes
  Part& part = member.unit().parts_[static_cast<size_t>(&member.part() - member.unit().parts_.data())];
  if (part.home->keeps()) return part.home->take(member.offset(), ordered);
  auto [begin, length] = part.home->own();
  if (length == 0) length = part.numel;
  const int64_t from = std::max(begin, member.offset());
  const int64_t to = std::min(begin + length, member.offset() + member.numel());
  if (from < to) snapshot::keep(part.mapped.narrow(0, from, to - from));
  if (from < to) part.mapped.narrow(0, from, to - from).copy_(ordered.narrow(0, from - member.offset(), to - from));
}

void Residency::note_up_to_date() {
  const MutexLock lock(mutex_);
  for (auto& unit : units_) {
    unit->pieces_written_ = false;
    for (auto& part : unit->parts_) {
      if (!unit->fixed_) continue;
      part.version = part.home->version();
      for (auto& member : part.members) member->set_behind(false);
    }
  }
}

void Residency::note_piece_write(Unit& unit) {
  const MutexLock lock(mutex_);
  unit.pieces_written_ = !writes_together();
}

void Residency::bring_up_to_date(Unit& unit, const Member& member) {
  if (!unit.has_image_ && !member.is_behind() && !unit.pieces_written_.load(std::memory_order_relaxed)) return;
  if (!unit.fixed_) return evict(unit);  // it is fetched anew
  {
    const MutexLock lock(mutex_);
    if (writes_together() || !publish_) return;
    const bool behind = member.is_behind() || std::any_of(unit.parts_.begin(), unit.parts_.end(), [](const Part& part) {
                          return part.home->version() != part.version;
                        });
    if (!behind && !unit.pieces_written_) return;
  }
  publish_();
}

void Residency::wrote(Member& member, const at::Tensor& values) {
  const MutexLock lock(mutex_);
  const PlainTensors plain;
  Part& part = member.unit().parts_[static_cast<size_t>(&member.part() - member.unit().parts_.data())];
  at::Tensor slice = part.flat.narrow(0, member.offset(), member.numel());
  if (values.defined()) slice.copy_(values);
  if (member.unit().discards_ > 0) return;
  if (scribe_ && !writes_together()) scribe_(member, slice);
  if (!part.home->keeps()) return;
  part.home->take(member.offset(), values.defined() ? values : slice);
  // Values that a home has rounded are fetched anew: every unit computes with the same ones, resident or not.
  part.version = part.home->rounds() ? -1 : part.home->version();
  // Each rank has the exact values of its own slice only.
  if (values.defined() && (part.home->collective() || part.home->sharers() > 1)) member.set_behind(true);
}

at::Tensor Residency::exact(const Member& member) const {
  const MutexLock lock(mutex_);
  const PlainTensors plain;
  const Part& part = member.part();
  at::Tensor values =
      part.flat.narrow(0, member.offset(), member.numel()).to(*part.home->keeps(), false, /*copy=*/true);
  part.home->refine(member.offset(), values);
  return values;
}

/// As the policy says what is soon.
bool Residency::comes_back_soon(const Unit& unit) const {
  const int64_t distance = trace_.distance(unit.index_);
  if (!policy_.reuse_bytes) return distance <= policy_.reuse_distance;
  if (distance == Trace::kNever) return false;
  int64_t between = 0;
  for (int64_t ahead = 1; ahead < distance && between <= *policy_.reuse_bytes; ++ahead)
    between += units_[static_cast<size_t>(trace_.next(ahead))]->bytes();
  return between <= *policy_.reuse_bytes;
}

/// The program goes on from the current unit to another one.
void Residency::arrive(Unit& unit) {
  Unit* left = current_;
  current_ = &unit;
  const int32_t expected = trace_.next(1);
  trace_.record(unit.index_);
  // A unit that follows itself is one that release() came between, as a step does after some passes only.
  if (surprise_ && left && expected >= 0 && expected != unit.index_ && expected != left->index_)
    surprise_(*left, *units_[static_cast<size_t>(expected)], unit);
  if (left && policy_.evict_after_use && !left->keep_ && left->pins_ == 0 && left->state_ == State::resident &&
      !comes_back_soon(*left))
    drop(*left);
  if (unit.state_ == State::resident) look_ahead(policy_.prefetch);
}

/// @param units  at most so many are fetched ahead
void Residency::look_ahead(int64_t units) {
  std::vector<bool> seen;
  if (units == Policy::kWholePass) {
    seen.resize(units_.size());
    if (current_) seen[static_cast<size_t>(current_->index_)] = true;
  }
  const auto enough = [&] {
    if (!policy_.prefetch_bytes) return false;
    int64_t ahead = 0;
    for (const auto& unit : units_)
      if (unit->state_ == State::fetching && unit.get() != current_) ahead += unit->bytes();
    return ahead >= *policy_.prefetch_bytes;
  };
  // The unit that is being waited for does not count.
  const int64_t allowed = policy_.outstanding + (current_ && current_->state_ == State::fetching ? 1 : 0);
  for (int64_t ahead = 1; ahead <= units && outstanding_ < allowed; ++ahead) {
    const int32_t index = trace_.next(ahead);
    if (index < 0) return;
    if (!seen.empty()) {
      if (seen[static_cast<size_t>(index)]) return;
      seen[static_cast<size_t>(index)] = true;
    }
    Unit& next = *units_[static_cast<size_t>(index)];
    if (next.state_ != State::absent) continue;
    if (enough()) return;
    // Fetching ahead may push out only what is needed later than it.
    if (policy_.budget_bytes && present_bytes_ + next.bytes() > *policy_.budget_bytes) {
      int64_t freed = 0;
      for (const auto& other : units_)
        if (!other->fixed_ && other->state_ == State::resident && other->pins_ == 0 && other.get() != current_ &&
            trace_.distance(other->index_) > ahead)
          freed += other->bytes();
      if (present_bytes_ - freed + next.bytes() > *policy_.budget_bytes) return;
    }
    try {
      start(next);
    } catch (const ResourceError&) {
      // A unit that does not fit ahead of time may fit when it is needed. Ranks that gather must not part ways, though.
      for (const auto& part : next.parts_)
        if (part.home->collective()) throw;
      return;
    }
  }
}

void Residency::prefetch_next() {
  const MutexLock lock(mutex_);
  look_ahead(std::max<int64_t>(policy_.prefetch, 1));
}

/// Throws out what is needed last, until `bytes` more fit. Among units that are needed about as late, and each of which
/// makes room enough, the smallest goes: fetching it again costs least.
void Residency::make_room(int64_t bytes) {
  while (policy_.budget_bytes && present_bytes_ + bytes > *policy_.budget_bytes) {
    const int64_t lacking = present_bytes_ + bytes - *policy_.budget_bytes;
    struct Candidate {
      Unit* unit;
      int64_t distance, bytes;
    };
    c10::SmallVector<Candidate, 64> candidates;
    const Candidate* last = nullptr;
    for (const auto& unit : units_)
      if (!unit->fixed_ && unit->state_ == State::resident && unit->pins_ == 0 && unit.get() != current_)
        candidates.push_back({unit.get(), trace_.distance(unit->index_), unit->bytes()});
    const auto later = [](const Candidate& a, const Candidate& b) {
      return a.distance > b.distance || (a.distance == b.distance && a.unit->last_use_ < b.unit->last_use_);
    };
    for (const auto& candidate : candidates)
      if (!last || later(candidate, *last)) last = &candidate;
    if (!last) return;  // an operator needs more than the budget: it gets it
    const Candidate* victim = last;
    for (const auto& candidate : candidates)
      if (candidate.bytes >= lacking && candidate.distance >= last->distance / 2 &&
          (candidate.bytes < victim->bytes || (candidate.bytes == victim->bytes && later(candidate, *victim))))
        victim = &candidate;
    drop(*victim->unit);
  }
}

void Residency::start(Unit& unit) {
  PlainTensors plain;
  if (!unit.fixed_) make_room(unit.bytes());
  try {
    for (auto& part : unit.parts_) {
      part.version = part.home->version();  // what comes is as it is now, whenever it arrives
      if (part.mapped.defined()) {
        part.flat = part.mapped;
      } else {
        const meta_memory::Purpose whole(MemoryUse::gathered);
        part.flat = buffers_.take(part.numel, part.dtype, part.device);
        if (policy_.budget_bytes) buffers_.keep_at_most(*policy_.budget_bytes - present_bytes_ - unit.bytes());
      }
      counters().add_resident(part.resident_bytes());
      if (part.mapped.defined()) continue;
      const auto kind = part.home->collective() ? trace::SpanKind::unit_gather : trace::SpanKind::unit_fetch;
      const trace::Topic topic(kind, unit.name_, part.bytes());
      trace::Span at_once(kind, unit.name_, part.bytes());
      part.transfer = part.home->fetch(part.flat);
      if (part.transfer) at_once.cancel();  // its carrier tells of it
      counters().bytes_fetched.fetch_add(part.bytes(), std::memory_order_relaxed);
    }
  } catch (...) {
    for (auto& part : unit.parts_) {
      part.transfer.reset();
      if (part.flat.defined()) counters().add_resident(-part.resident_bytes());
      part.flat.reset();
    }
    throw;
  }
  if (!unit.fixed_) present_bytes_ += unit.bytes();  // what never goes is in no budget
  unit.state_ = State::fetching;
  counts::most(ResidencyCount::fetches_most, ++outstanding_);
}

void Residency::finish(Unit& unit) {
  --outstanding_;
  trace::Span waits(trace::SpanKind::unit_wait, unit.name_, unit.bytes());
  if (unit.fixed_) waits.cancel();
  try {
    const PlainTensors plain;  // what arrives may have to be decoded
    for (auto& part : unit.parts_)
      if (part.transfer) part.transfer->wait();
  } catch (...) {
    unit.state_ = State::resident;
    unit.dirty_ = false;
    drop(unit);
    throw;
  }
  for (auto& part : unit.parts_) {
    part.transfer.reset();
    for (auto& member : part.members) {
      member->open(part.flat.mutable_data_ptr());
      member->set_behind(false);
    }
  }
  unit.state_ = State::resident;
}

void Residency::drop(Unit& unit) {
  PlainTensors plain;
  if (unit.fixed_ || unit.private_) return;
  if (unit.state_ == State::fetching) finish(unit);
  if (unit.state_ == State::absent) return;
  const trace::Span evicts(trace::SpanKind::unit_evict, unit.name_, unit.bytes());
  for (auto& part : unit.parts_) {  // first: what can't be stored stays, whole and as it is
    if (!unit.dirty_ || part.mapped.defined()) continue;
    snapshot::keep_all();  // a home keeps its bytes where it likes
    part.home->store(part.flat);
    counters().bytes_stored.fetch_add(part.bytes(), std::memory_order_relaxed);
  }
  for (auto& part : unit.parts_) {
    part.transfer.reset();
    // The bytes that are there may be this rank's own image of values that have been written since.
    const bool current =
        part.home->version() == part.version &&
        std::none_of(part.members.begin(), part.members.end(), [](const auto& member) { return member->is_behind(); });
    for (auto& member : part.members) member->close();
    if (policy_.keep_for_backward && current && !part.mapped.defined()) part.home->keep_for_backward(part.flat);
    else part.home->forget();
    if (!part.mapped.defined()) buffers_.give(std::move(part.flat));
    part.flat.reset();
    counters().add_resident(-part.resident_bytes());
  }
  unit.dirty_ = false;
  unit.state_ = State::absent;
  present_bytes_ -= unit.bytes();
  if (policy_.budget_bytes)
    buffers_.keep_at_most(*policy_.budget_bytes - present_bytes_);  // memory is memory, in use or not
  counters().evictions.fetch_add(1, std::memory_order_relaxed);
}

/// For scopes that end, which can't throw: a unit whose changes can't be stored stays present, and the next user of its
/// room hears of it.
void Residency::try_drop(Unit& unit) {
  try {
    drop(unit);
  } catch (const ResourceError&) {
  }
}

void Residency::unpin(Unit& unit) {
  const MutexLock lock(mutex_);
  if (--unit.pins_ == 0 && paranoid_flag().load(std::memory_order_relaxed)) try_drop(unit);
}

void Residency::begin_raw_access(Unit& unit, bool writeback) {
  look_at_homes(unit);
  for (const auto& part : unit.parts_)
    for (const auto& member : part.members) bring_up_to_date(unit, *member);
  // If rank 0 alone keeps bytes that are lost later, the others have room to fetch ahead, and must not.
  pin(unit, /*writes=*/false, /*foretells=*/writeback);
  const MutexLock lock(mutex_);
  const bool was_private = unit.private_;
  make_private(unit, /*of_ours_too=*/!writeback);
  ++unit.open_;
  if (!writeback) ++unit.discards_;
  if (!was_private || writeback) return;
  for (auto& part : unit.parts_) part.before = part.flat.clone();  // what operators wrote stays
}

void Residency::end_raw_access(Unit& unit, bool writeback) {
  const MutexLock lock(mutex_);
  const PlainTensors plain;
  --unit.open_;
  if (!writeback) --unit.discards_;
  if (!unit.fixed_ && !unit.private_) {
    unit.dirty_ = writeback;
    if (--unit.pins_ > 0) return;
    // Neighbours must not keep bytes that are lost.
    const bool keeps = policy_.keep_for_backward;
    policy_.keep_for_backward = keeps && writeback;
    try_drop(unit);
    policy_.keep_for_backward = keeps;
    return;
  }
  --unit.pins_;
  bool stays_private = writeback;
  for (auto& part : unit.parts_) {
    if (writeback) snapshot::keep_all(), part.home->store(part.flat), part.version = part.home->version();
    else if (part.before.defined()) part.flat.copy_(part.before), part.before.reset(), stays_private = true;
  }
  if (!stays_private) share(unit, /*keep=*/false);
}

void Residency::evict(Unit& unit) {
  const MutexLock lock(mutex_);
  if (unit.pins_ == 0) drop(unit);
}

void Residency::release() {
  const MutexLock lock(mutex_);
  for (auto& unit : units_) {
    if (unit->pins_ == 0) drop(*unit);
    for (const auto& part : unit->parts_) part.home->forget();
  }
  current_ = nullptr;
}

void Residency::trim() {
  const MutexLock lock(mutex_);
  buffers_.trim();
}

void Residency::follow_moves(std::string (*absent)(const std::string& name)) {
  const MutexLock lock(mutex_);
  for (auto& unit : units_) {
    if (!unit->fixed_) continue;
    for (auto& part : unit->parts_) {
      const bool elsewhere = part.flat.device() != part.device;
      part.absent = elsewhere ? absent : nullptr;
      for (auto& member : part.members) {
        if (elsewhere) member->close();
        else member->move(part.flat.mutable_data_ptr());
      }
    }
  }
}

Policy Residency::policy() const {
  const MutexLock lock(mutex_);
  return policy_;
}

void Residency::set_policy(const Policy& policy) {
  const MutexLock lock(mutex_);
  policy_ = policy;
}

int64_t Residency::surprises() const {
  const MutexLock lock(mutex_);
  return trace_.surprises();
}

void Residency::expect_order_of_addition() {
  const MutexLock lock(mutex_);
  for (const auto& unit : units_) trace_.record(unit->index_);
}

const Member* Residency::replaced_member() const {
  for (const auto& unit : units_)
    for (const auto& part : unit->parts_)
      for (const auto& member : part.members)
        if (!member->intact()) return member.get();
  return nullptr;
}

void Pins::release() {
  for (Unit* unit : units_) unit->owner().unpin(*unit);
}

void Pins::add(Unit& unit, bool writes) {
  unit.owner().pin(unit, writes);
  units_.push_back(&unit);
}

}  // namespace accelerate::residency
