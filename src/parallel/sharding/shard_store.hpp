#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "parallel/sharding/gradient_reducer.hpp"
#include "parallel/sharding/settings.hpp"
#include "parallel/sharding/shard_groups.hpp"
#include "parallel/sharding/sharded_part.hpp"
#include "parallel/sharding/shards_on_disk.hpp"
#include "residency/home.hpp"

namespace accelerate::residency {
class Residency;
class Unit;
}  // namespace accelerate::residency

namespace accelerate::parallel {

/// Two numbers that no step leaves as they are, of a piece of parameters. The second one as its bits, so that NaN is
/// itself.
using Digest = std::pair<int64_t, int64_t>;
Digest digest_of(const at::Tensor& piece);

/// The store of a model's shards, which also brings them to the other ranks of the mesh's shard group. "Collective" is
/// about this group here.
class ShardStore {
 public:
  explicit ShardStore(std::unique_ptr<ShardsOnDisk> disk) : disk_(std::move(disk)) {}
  ShardStore(const ShardStore&) = delete;
  ShardStore& operator=(const ShardStore&) = delete;
  virtual ~ShardStore() = default;
  /// The shards that lie on disks; mostly there are none.
  ShardsOnDisk& disk() const { return *disk_; }
  /// Gives part.master memory, zeros.
  virtual void allocate(ShardedPart& part) = 0;
  virtual std::unique_ptr<residency::Home> home(ShardedPart& part, const std::string& name) = 0;
  virtual std::unique_ptr<GradientReducer> make_reducer() = 0;
  /// Whether part.master is to be a member of the part's unit: the same bytes as the flat storage's.
  virtual bool pieces_in_unit(const ShardedPart& part) const { return static_cast<void>(part), false; }
  /// The tensor that modules compute with, if it lies in this process's own memory for good: the master itself, or an
  /// image of it. Undefined where units come and go, and where ranks share memory.
  virtual at::Tensor computed(const ShardedPart& part) const { return static_cast<void>(part), at::Tensor(); }
  /// Whether this rank has changed part.master since the others were given it, as far as what is computed with tells;
  /// true where nothing tells. Not collective.
  virtual bool may_have_changed(const ShardedPart& part) const { return static_cast<void>(part), true; }
  /// By part: whether any rank's part.master is another than when this was asked last, or published; nothing where that
  /// is not known. Collective.
  virtual std::optional<std::vector<char>> changed_parts() { return std::nullopt; }
  /// This rank computes with the unit. Where no gather compares that between ranks, the next of the collective
  /// functions below does, @throws CommError on all ranks when they were others, or came in another order.
  virtual void use(const residency::Unit& unit) { static_cast<void>(unit); }
  /// From here on the first use of a unit gathers it anew. @param kept  those that stay through a pass, too
  virtual void reshard(bool kept) { static_cast<void>(kept); }
  /// Before ranks gather something together that is no forward: names those that do something else. Collective.
  virtual void meet(const char* operation) { static_cast<void>(operation); }
  /// From here on everybody computes with all writes to parameters and shards since the last step. Collective.
  virtual void refresh(residency::Residency& units) { static_cast<void>(units); }
  /// Before the shards change: nobody reads them any more. Collective.
  virtual void before_step(residency::Residency& units) { static_cast<void>(units); }
  /// Within a step, which has changed part.master: what is computed with takes its values now, and not in publish().
  virtual void publish_part(ShardedPart& part) { static_cast<void>(part); }
  /// part.master, which lies on a disk, has the values of a coming step for a while: what is computed with gets its own
  /// of them beside those that it has.
  virtual void make_ahead(ShardedPart& part) { static_cast<void>(part); }
  /// Within a step in whose place such values, or others, were taken over: as publish_part(), by what was made ahead if
  /// there is any.
  virtual void take_ahead(ShardedPart& part) { publish_part(part); }
  /// After they changed: everybody reads the new values. Collective.
  virtual void publish(residency::Residency& units) { static_cast<void>(units); }

 private:
  std::unique_ptr<ShardsOnDisk> disk_;
};

/// Ranks of one host share their memory, whole models don't move, all others gather through c10d. Collective.
std::unique_ptr<ShardStore> make_shard_store(std::vector<ShardedPart>& parts, const ShardGroups& groups,
                                             const at::Device& device, const ShardingSettings& settings);

/// Null on all ranks when they can't share memory (see comm::SharedMemory); else it takes the disk. Collective.
std::unique_ptr<ShardStore> shared_memory_store(std::vector<ShardedPart>& parts, const ShardGroups& groups,
                                                const ReducerOptions& options, std::unique_ptr<ShardsOnDisk>& disk);

}  // namespace accelerate::parallel
