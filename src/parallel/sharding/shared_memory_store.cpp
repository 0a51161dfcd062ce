/// The shards of all ranks of one host side by side in memory that all of them see: the gathered parameters are where
/// they are, once for all ranks, and gradients are added up by reading the peers' buffers. Nothing is sent.

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <new>
#include <utility>

#include "comm/average.hpp"
#include "comm/comms_log.hpp"
#include "comm/group.hpp"
#include "comm/shared_memory.hpp"
#include "observe/trace.hpp"
#include "parallel/sharding/counts.hpp"
#include "parallel/sharding/replicas.hpp"
#include "parallel/sharding/shard_store.hpp"
#include "parallel/sharding/used_units.hpp"
#include "residency/homes/kept.hpp"
#include "residency/residency.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {
namespace {

constexpr size_t kLine = 64;
constexpr int64_t kNothing = -1;

/// A rank's message to the others about its gradients of one part. Two messages are used in turn, because a fast rank
/// may be a whole backward ahead of a slow one.
struct alignas(kLine) Announcement {
  std::atomic<uint64_t> generation;  ///< of backward passes; set last
  int64_t offset;                    ///< of the part's gradients in the rank's room; kNothing: it has none
};
struct alignas(kLine) Consumed {
  std::atomic<uint64_t> count;  ///< how often any rank has read this rank's gradients of this part
};
struct alignas(kLine) Waiting {
  std::atomic<bool> for_room;  ///< the rank can't go on before others have read its gradients
};

/// The layout of the mapping. The same on all ranks.
struct StorePlan {
  StorePlan(const std::vector<ShardedPart>& parts, int64_t world) : world(world), parts(parts.size()) {
    const auto reserve = [this](size_t bytes) {
      const size_t at = size;
      size = whole_lines(size + bytes);
      return at;
    };
    announcements = reserve(2 * static_cast<size_t>(world) * parts.size() * sizeof(Announcement));
    consumed = reserve(static_cast<size_t>(world) * parts.size() * sizeof(Consumed));
    size_t largest = 0, all = 0, largest_now = 0, all_now = 0;  // of what may be trained, and is trained
    for (const auto& part : parts) {
      computed.push_back(reserve(static_cast<size_t>(part.numel()) * c10::elementSize(part.compute_dtype)));
      members.push_back(member_count);
      dedicated.push_back(all);
      if (!part.trainable) continue;
      member_count += part.members.size();
      const size_t bytes = whole_lines(static_cast<size_t>(part.numel()) *
                                       c10::elementSize(part.reduce_dtype.value_or(part.compute_dtype)));
      largest = std::max(largest, bytes);
      all += bytes;
      if (!part.trained) continue;
      largest_now = std::max(largest_now, bytes);
      all_now += bytes;
    }
    // One can be filled while the last one is read; many small ones need not wait for each other.
    const auto in_use = [](size_t largest, size_t all) {
      return std::min(std::max(2 * largest, size_t{8} << 20), all);
    };
    recycled = in_use(largest, all);
    for (auto& place : dedicated) place += recycled;
    used = reserve(2 * static_cast<size_t>(world) * member_count);
    waiting = reserve(static_cast<size_t>(world) * sizeof(Waiting));
    likely = size + static_cast<size_t>(world) * in_use(largest_now, all_now);
    room = recycled + all;
    rooms = reserve(static_cast<size_t>(world) * room);
  }
  static size_t whole_lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

  int64_t world;
  size_t parts, size = 0;
  size_t announcements = 0, consumed = 0, used = 0, waiting = 0, rooms = 0;  ///< offsets
  std::vector<size_t> computed, members;  ///< per part: offset of its parameters; its first member among all
  size_t member_count = 0;                ///< of parts that may be trained
  /// Each rank has a room for its gradients. The first bytes are used again and again; behind them each part has a
  /// place of its own, of which memory is taken only when a part must go there.
  size_t room = 0, recycled = 0;
  std::vector<size_t> dedicated;  ///< per part: that place in the room
  size_t likely = 0;              ///< bytes that are used if no part must go to a place of its own
};

struct Mapping {
  Mapping(std::shared_ptr<comm::SharedMemory> memory, StorePlan plan)
      : memory(std::move(memory)), plan(std::move(plan)) {}
  std::shared_ptr<comm::SharedMemory> memory;
  StorePlan plan;

  char* at(size_t offset) const { return memory->data() + offset; }
  Announcement& announcement(uint64_t generation, int64_t rank, size_t part) const {
    return reinterpret_cast<Announcement*>(at(plan.announcements))
        [((generation & 1) * static_cast<size_t>(plan.world) + static_cast<size_t>(rank)) * plan.parts + part];
  }
  std::atomic<uint64_t>& consumed(int64_t rank, size_t part) const {
    return reinterpret_cast<Consumed*>(at(plan.consumed))[static_cast<size_t>(rank) * plan.parts + part].count;
  }
  /// One byte per member of the part: the rank has a gradient for it.
  char* used(uint64_t generation, int64_t rank, size_t part) const {
    return at(plan.used) +
           ((generation & 1) * static_cast<size_t>(plan.world) + static_cast<size_t>(rank)) * plan.member_count +
           plan.members[part];
  }
  std::atomic<bool>& waits_for_room(int64_t rank) const {
    return reinterpret_cast<Waiting*>(at(plan.waiting))[rank].for_room;
  }
  char* room(int64_t rank) const { return at(plan.rooms) + static_cast<size_t>(rank) * plan.room; }
};

class SharedReducer final : public GradientReducer {
 public:
  SharedReducer(std::vector<ShardedPart>& parts, const ShardGroups& groups, std::shared_ptr<Mapping> mapping,
                const ReducerOptions& options)
      : parts_(parts),
        group_(groups.shard),
        replicas_(groups.replicate ? std::make_unique<Replicas>(parts, groups.replicate) : nullptr),
        mapping_(std::move(mapping)),
        options_(options),
        used_(parts.size()),
        states_(parts.size()),
        rounds_(parts.size()) {}

  bool take(ShardedPart& part, ShardedMember& member, const at::Tensor& gradient) override {
    at::NoGradGuard no_grad;
    join(part.index);
    FlatGradient& whole = states_[part.index].whole;
    if (!whole.begun()) whole.begin(part, allocate(part.index));
    if (!whole.take(member, gradient)) return false;
    announce(part.index);
    progress();
    return true;
  }

  bool came(const ShardedMember& member) const override { return states_[member.part].whole.came(member.index); }

  void finish() override {
    at::NoGradGuard no_grad;
    for (const auto& part : parts_)
      if (part.trained) join(part.index);
    for (const size_t p : trained_) {
      State& state = states_[p];
      if (state.announced) continue;
      if (state.whole.begun()) state.whole.fill(parts_[p]);
      announce(p);
    }
    mapping_->memory->wait("reduction of gradients", [&] { return progress(); });
    if (replicas_ && !apart_) {
      replicas_->finish(used_);
      for (const size_t p : trained_) give(p), tell_given(parts_[p]);
    }
    for (auto& state : states_) {
      State next;
      next.gradient = std::move(state.gradient);
      state = std::move(next);
    }
    for (const size_t p : trained_) ++rounds_[p];
    trained_.clear();
    ++generation_;
  }

 private:
  /// This backward is about the part, too.
  void join(size_t p) {
    if (std::exchange(states_[p].joined, true)) return;
    trained_.push_back(p);
    waiting_.push_back(p);
  }

  struct State {
    FlatGradient whole;  ///< in this rank's room
    int64_t offset = kNothing;
    bool joined = false, announced = false;
    comm::LoggedCollective under_way;  ///< from the announcement until all ranks' shards are added up here
    at::Tensor gradient;  ///< this rank's slice of the average; its memory is used again when nobody else holds it
  };
  struct Slot {
    size_t part, begin, end;  ///< of the room
    uint64_t generation, round;
  };
  enum class Counted { all, open };

  static at::ScalarType wire(const ShardedPart& part) { return part.reduce_dtype.value_or(part.compute_dtype); }

  /// A slice of this rank's room.
  at::Tensor allocate(size_t p) {
    const auto type = wire(parts_[p]);
    const size_t bytes = StorePlan::whole_lines(static_cast<size_t>(parts_[p].numel()) * c10::elementSize(type));
    const size_t begin = find_room(p, bytes);
    const auto later = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& slot) { return slot.begin > begin; });
    slots_.insert(
        later, {.part = p, .begin = begin, .end = begin + bytes, .generation = generation_, .round = rounds_[p] + 1});
    states_[p].offset = static_cast<int64_t>(begin);
    return at::from_blob(mapping_->room(group_->rank()) + begin, {parts_[p].numel()}, at::TensorOptions().dtype(type));
  }

  /// The lowest free slice of what is used again. If there is none, waits until the peers have read something, but
  /// only as long as that can help: parts that still lack gradients (tied embeddings are open from the first gradient
  /// to the last) free nothing, and ranks that complete parts in different orders would wait for each other. Then it is
  /// the part's own place.
  size_t find_room(size_t p, size_t bytes) {
    constexpr int kPolls = 100;  // so long two ranks may both wait and yet have something to read
    auto begin = gap(bytes, Counted::all);
    if (!begin && gap(bytes, Counted::open)) {
      auto& waits = mapping_->waits_for_room(group_->rank());
      waits.store(true, std::memory_order_release);
      int polls = 0;
      mapping_->memory->wait(
          "room for gradients",
          [&] {
            progress();  // the peers may be waiting for us in turn
            return (begin = gap(bytes, Counted::all)) || (peer_waits_for_room() && ++polls > kPolls);
          },
          /*in_step=*/false);
      waits.store(false, std::memory_order_release);
    }
    if (begin) return *begin;
    // The bytes in that place are of the last backward, of which every rank has announced everything: nobody needs us
    // to read them.
    const auto taken = [&](const Slot& slot) { return slot.begin == mapping_->plan.dedicated[p]; };
    mapping_->memory->wait(
        "room for gradients",
        [&] {
          forget_what_was_read();
          return std::none_of(slots_.begin(), slots_.end(), taken);
        },
        /*in_step=*/false);
    return mapping_->plan.dedicated[p];
  }

  /// The lowest slice of @p bytes between slots, or, with Counted::open, between those that are still being filled.
  std::optional<size_t> gap(size_t bytes, Counted counted) {
    forget_what_was_read();
    size_t at = 0;
    for (const Slot& slot : slots_) {
      if (counted == Counted::open && (slot.generation != generation_ || states_[slot.part].announced)) continue;
      if (slot.begin >= at + bytes) break;
      at = slot.end;
    }
    return at + bytes <= mapping_->plan.recycled ? std::optional(at) : std::nullopt;
  }

  void forget_what_was_read() {
    slots_.erase(
        std::remove_if(slots_.begin(), slots_.end(),
                       [&](const Slot& slot) {
                         return mapping_->consumed(group_->rank(), slot.part).load(std::memory_order_acquire) >=
                                slot.round * static_cast<uint64_t>(group_->world_size());
                       }),
        slots_.end());
  }

  bool peer_waits_for_room() const {
    for (int64_t rank = 0; rank < group_->world_size(); ++rank)
      if (rank != group_->rank() && mapping_->waits_for_room(rank).load(std::memory_order_acquire)) return true;
    return false;
  }

  void announce(size_t p) {
    State& state = states_[p];
    state.announced = true;
    char* used = mapping_->used(generation_, group_->rank(), p);
    for (size_t m = 0; m < parts_[p].members.size(); ++m) used[m] = static_cast<char>(state.whole.came(m));
    auto& announcement = mapping_->announcement(generation_, group_->rank(), p);
    announcement.offset = state.offset;
    const ShardedPart& part = parts_[p];
    state.under_way = comm::LoggedCollective(
        comm::Collective::reduce_scatter, part.numel() * static_cast<int64_t>(c10::elementSize(wire(part))), *group_);
    if (state.whole.begun()) {
      if (options_.before != 1) at::Tensor(state.whole.flat()).div_(options_.before);
      count_reduced(state.whole.flat());
    }
    announcement.generation.store(generation_, std::memory_order_release);
  }

  /// Adds up this rank's slice of every part that all ranks have announced. @return whether none is left.
  bool progress() {
    waiting_.erase(
        std::remove_if(
            waiting_.begin(), waiting_.end(),
            [&](size_t p) {
              for (int64_t rank = 0; rank < group_->world_size(); ++rank)
                if (mapping_->announcement(generation_, rank, p).generation.load(std::memory_order_acquire) !=
                    generation_)
                  return false;
              reduce(p);
              return true;
            }),
        waiting_.end());
    return waiting_.empty();
  }

  void reduce(size_t p) {
    at::NoGradGuard no_grad;
    ShardedPart& part = parts_[p];
    const int64_t world = group_->world_size(), length = part.numel() / world, first = group_->rank() * length;
    const auto type = wire(part);
    const trace::Span span(trace::SpanKind::gradient_reduce, part.unit_name(),
                           part.numel() * static_cast<int64_t>(c10::elementSize(type)));
    std::vector<const void*> inputs;
    auto& used = used_[p];
    used.assign(part.members.size(), 0);
    for (int64_t rank = 0; rank < world; ++rank) {
      const int64_t offset = mapping_->announcement(generation_, rank, p).offset;
      if (offset != kNothing)
        inputs.push_back(mapping_->room(rank) + offset + first * static_cast<int64_t>(c10::elementSize(type)));
      const char* theirs = mapping_->used(generation_, rank, p);
      for (size_t m = 0; m < used.size(); ++m) used[m] = static_cast<char>(used[m] | theirs[m]);
    }
    if (!inputs.empty() || (replicas_ && !apart_)) {
      at::Tensor& gradient = states_[p].gradient;
      if (!gradient.defined() || gradient.scalar_type() != type || gradient.storage().use_count() > 1)
        gradient = at::empty({length}, at::TensorOptions().dtype(type));
      if (inputs.empty()) gradient.zero_();
      else
        comm::average(type, gradient.mutable_data_ptr(), inputs, length, static_cast<double>(world) / options_.before);
      if (replicas_ && !apart_) replicas_->add(p, gradient);
      else give(p);
    }
    for (int64_t rank = 0; rank < world; ++rank) mapping_->consumed(rank, p).fetch_add(1, std::memory_order_acq_rel);
    states_[p].under_way.end();
    if (!replicas_ || apart_) tell_given(part);  // the others go on meanwhile
  }

  /// The shards get their shards of a part's average.
  void give(size_t p) {
    ShardedPart& part = parts_[p];
    const at::Tensor gradient = gradients_go() ? std::exchange(states_[p].gradient, {}) : states_[p].gradient;
    tell_coming(part);
    if (options_.times != 1) at::Tensor(gradient).mul_(options_.times);
    if (options_.keeps_low_precision() && gradient.scalar_type() != part.master_dtype)
      counts::add(ShardingCount::low_precision_gradients);
    part.add_to_gradients(options_.keeps_low_precision() ? gradient : gradient.to(part.master_dtype), used_[p],
                          options_.widens());
  }

  std::vector<ShardedPart>& parts_;
  std::shared_ptr<comm::Group> group_;
  std::unique_ptr<Replicas> replicas_;  ///< null: there is one
  std::shared_ptr<Mapping> mapping_;
  ReducerOptions options_;
  std::vector<std::vector<char>> used_;  ///< per part and member: somebody has a gradient for it
  std::vector<State> states_;
  std::vector<size_t> trained_, waiting_;  ///< parts of this backward; those that are not reduced yet
  std::vector<Slot> slots_;                ///< of the room that somebody has yet to fill or to read, by their begin
  uint64_t generation_ = 1;
  std::vector<uint64_t> rounds_;  ///< per part: backwards that were about it, the same on all ranks
};

/// Parameters that several ranks see at once: each counts its share of the bytes.
class SharedHome final : public residency::Home {
 public:
  /// @param own     what this rank decides of it; empty where nothing ever changes
  /// @param master  own(), if it is kept elsewhere and in another dtype; else undefined
  SharedHome(at::Tensor flat, int64_t sharers, const OwnSlice& own, const at::Tensor& master)
      : flat_(std::move(flat)), sharers_(sharers), own_(own) {
    if (master.defined()) kept_.emplace(master, own.begin);
  }
  std::unique_ptr<residency::Transfer> fetch(const at::Tensor&) override { return nullptr; }
  void store(const at::Tensor& flat) override {
    if (kept_) kept_->take_back(flat);
  }
  std::optional<at::Tensor> mapped() override { return flat_; }
  residency::BytesPlace place() const override { return residency::BytesPlace::shards; }
  int64_t sharers() const override { return sharers_; }
  OwnSlice own() const override { return own_; }
  std::optional<at::ScalarType> keeps() const override { return kept_ ? std::optional(kept_->dtype()) : std::nullopt; }
  void refine(int64_t begin, const at::Tensor& values) const override { kept_->refine(begin, values); }
  void take(int64_t begin, const at::Tensor& values) override { kept_->take(begin, values); }
  int64_t version() const override { return kept_ ? kept_->version() : 0; }

 private:
  at::Tensor flat_;
  int64_t sharers_;
  OwnSlice own_;
  std::optional<residency::Kept> kept_;
};

class SharedMemoryStore final : public ShardStore {
 public:
  SharedMemoryStore(std::vector<ShardedPart>& parts, const ShardGroups& groups, std::shared_ptr<Mapping> mapping,
                    const ReducerOptions& options, std::unique_ptr<ShardsOnDisk> disk)
      : ShardStore(std::move(disk)),
        parts_(parts),
        groups_(groups),
        group_(groups.shard),
        mapping_(std::move(mapping)),
        options_(options),
        computed_(parts.size()),
        images_ahead_(parts.size()),
        published_(parts.size()) {
    for (size_t p = 0; p < parts.size(); ++p)  // views keep the mapping alive
      computed_[p] = at::from_blob(
          mapping_->at(mapping_->plan.computed[p]), {parts[p].numel()}, [mapping = mapping_](void*) {},
          at::TensorOptions().dtype(parts[p].compute_dtype));
  }

  void allocate(ShardedPart& part) override {
    const at::Tensor slice = own(part);
    if (is_image(part)) part.master = disk().allocate_master(part, slice.numel());
    if (part.master.defined()) return;
    part.master =
        is_image(part) ? at::zeros(slice.sizes(), slice.options().dtype(part.master_dtype)) : slice.variable_data();
  }
  std::unique_ptr<residency::Home> home(ShardedPart& part, const std::string&) override {
    counts::add(ShardingCount::units_shared);
    const auto [begin, length] = slice_of(part);
    const auto own = part.stands_in ? residency::Home::OwnSlice{} : residency::Home::OwnSlice{begin, length};
    return std::make_unique<SharedHome>(computed_[part.index], group_->world_size(), own,
                                        is_image(part) ? part.master : at::Tensor());
  }
  /// Shards lie in what all see, so writes to them are as those to the parameters.
  bool pieces_in_unit(const ShardedPart& part) const override { return !part.stands_in && !is_image(part); }
  bool may_have_changed(const ShardedPart& part) const override {
    const at::NoGradGuard no_grad;
    return is_image(part) && disk().may_have_changed(part) &&
           !at::equal(own(part), part.master.detach().to(part.compute_dtype));
  }
  std::unique_ptr<GradientReducer> make_reducer() override {
    return std::make_unique<SharedReducer>(parts_, groups_, mapping_, options_);
  }
  void use(const residency::Unit& unit) override { used_.add(unit); }
  void reshard(bool kept) override { used_.reshard(kept); }
  void meet(const char* operation) override { meet_as_used(operation); }
  void refresh(residency::Residency& units) override {
    bool changed = units.has_private();
    for (const auto& part : parts_) changed |= is_image(part) && part.master._version() != published_[part.index];
    if (!meet_as_used("forward", changed)) return;
    units.share_again();
    publish_images(/*only_changed=*/true);
    units.note_up_to_date();
    mapping_->memory->barrier("forward");
  }
  void before_step(residency::Residency& units) override {
    meet_as_used("optimizer step");  // all have computed with the old values
    units.share_again();
    units.write_together(true);
  }
  void make_ahead(ShardedPart& part) override {
    if (is_image(part)) images_ahead_[part.index] = part.master.detach().to(part.compute_dtype);
  }
  void take_ahead(ShardedPart& part) override {
    if (at::Tensor image = std::exchange(images_ahead_[part.index], {}); image.defined()) publish_part(part, image);
    else publish_part(part);
  }
  void publish_part(ShardedPart& part) override { publish_part(part, part.master); }
  void publish_part(ShardedPart& part, const at::Tensor& values) {
    const at::NoGradGuard no_grad;
    if (!is_image(part)) return;
    own(part).copy_(values);
    published_[part.index] = part.master._version();
    in_step_.push_back(part.index);
  }
  void publish(residency::Residency& units) override {
    units.write_together(false);
    publish_images(/*only_changed=*/false);
    in_step_.clear();
    units.note_up_to_date();
    mapping_->memory->barrier("optimizer step");
  }

 private:
  /// @return whether `changed` is true on any rank
  bool meet_as_used(const char* operation, bool changed = false) {
    const auto heard = mapping_->memory->meet(operation, {.flag = changed, .digest = used_.digest()});
    used_.check(operation, heard.alike);
    return heard.any;
  }
  static bool is_image(const ShardedPart& part) { return part.compute_dtype != part.master_dtype; }
  residency::Home::OwnSlice slice_of(const ShardedPart& part) const {
    const int64_t length = part.numel() / group_->world_size();
    return {.begin = group_->rank() * length, .length = length};
  }
  /// This rank's slice of the flat storage.
  at::Tensor own(const ShardedPart& part) const {
    const auto [begin, length] = slice_of(part);
    return computed_[part.index].narrow(0, begin, length);
  }
  /// @param only_changed  as tensors tell
  void publish_images(bool only_changed) {
    at::NoGradGuard no_grad;
    for (auto& part : parts_) {
      const bool done = only_changed || std::find(in_step_.begin(), in_step_.end(), part.index) != in_step_.end();
      if (!is_image(part) || (done && part.master._version() == published_[part.index])) continue;
      own(part).copy_(part.master);
      published_[part.index] = part.master._version();
    }
  }

  std::vector<ShardedPart>& parts_;
  std::vector<size_t> in_step_;  ///< parts that have been published within the step that runs
  ShardGroups groups_;
  std::shared_ptr<comm::Group> group_;  ///< groups_.shard
  std::shared_ptr<Mapping> mapping_;
  ReducerOptions options_;
  UsedUnits used_;
  std::vector<at::Tensor> computed_;      ///< per part: the whole flat storage
  std::vector<at::Tensor> images_ahead_;  ///< per part: this rank's slice of what is computed with after a coming step
  std::vector<int64_t> published_;        ///< per part that is an image: which version of its master
};

}  // namespace

std::unique_ptr<ShardStore> shared_memory_store(std::vector<ShardedPart>& parts, const ShardGroups& groups,
                                                const ReducerOptions& options, std::unique_ptr<ShardsOnDisk>& disk) {
  for (const auto& part : parts)
    if (part.trainable && !comm::can_average(part.reduce_dtype.value_or(part.compute_dtype))) return nullptr;
  StorePlan plan(parts, groups.ranks());
  auto memory = comm::SharedMemory::create(groups.shard, plan.size, plan.likely);
  if (!memory) return nullptr;
  return std::make_unique<SharedMemoryStore>(
      parts, groups, std::make_shared<Mapping>(std::move(memory), std::move(plan)), options, std::move(disk));
}

}  // namespace accelerate::parallel
