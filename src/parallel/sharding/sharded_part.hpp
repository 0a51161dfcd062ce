#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "residency/unit.hpp"

namespace accelerate::parallel {

/// One parameter of a part, and what this rank holds of it.
struct ShardedMember {
  std::string name;
  at::Tensor tensor;   ///< the module's
  size_t part = 0;     ///< among the model's parts
  size_t index = 0;    ///< among the part's members
  int64_t offset = 0;  ///< where it begins in the part's flat storage

  at::Tensor shard;   ///< this rank's shard: a view of the part's master, 1-D, possibly empty
  int64_t begin = 0;  ///< where the shard begins in the parameter, in the order of its memory
  int64_t at = 0;     ///< where it begins in this rank's slice of the flat storage

  /// The parameter in a flat storage of its part.
  at::Tensor view_in(const at::Tensor& flat) const { return flat.as_strided(tensor.sizes(), tensor.strides(), offset); }
  /// Its shard in a slice that is this rank's.
  at::Tensor piece_in(const at::Tensor& slice) const { return slice.narrow(0, at, shard.numel()); }
};

/// How one part of a unit (one flat storage) is split: rank r of `world` owns the r-th of `world` equal slices of
/// it.
struct ShardedPart {
  size_t index = 0;  ///< among all parts of the model
  residency::Unit* unit = nullptr;
  std::vector<ShardedMember> members;
  residency::Layout layout;
  bool trained = false;  ///< some member requires a gradient, or has one
  /// An optimizer may step on it: since the last forward it was trained, or had gradients from when it was.
  bool may_step = false;
  bool trainable = false;  ///< members may be trained, if they are not now
  bool stands_in = false;  ///< its members are no parameters, but stand in for them; frozen
  /// Some of its unit stand in: gradients go through those after its own (an adapter's) are there, so that the unit
  /// goes when the next one comes.
  bool beside_stand_ins = false;
  at::ScalarType master_dtype = at::kFloat;    ///< of the shards, of what the optimizer sees
  at::ScalarType compute_dtype = at::kFloat;   ///< of the flat storage
  std::optional<at::ScalarType> reduce_dtype;  ///< of gradients on the wire; unset: their own
  at::Tensor master;                           ///< [numel / world]: this rank's slice
  bool fp8 = false;                            ///< travels as fp8, where it travels
  at::Tensor fp8_scales;                       ///< [members], fp32: what travels is members' values times these
  bool int8 = false;                           ///< travels as 8-bit codes, where it travels
  bool coded = false;                          ///< frozen for good: is kept as 8-bit codes
  at::Tensor codes;                            ///< if so: all that is kept, uint8; master comes and goes
  bool int4 = false;                           ///< its gradients travel as 4-bit codes, where they travel

  int64_t numel() const { return layout.numel; }
  /// Its unit's, for people; empty before it has one.
  std::string_view unit_name() const { return unit ? std::string_view(unit->name()) : std::string_view(); }
  NamedTensors named_tensors() const;

  /// Cuts `master` into the members' shards.
  void cut(int64_t rank, int64_t world);
  /// Adds an averaged gradient's slice to the shards' gradients. `used`: per member, whether any rank has one.
  void add_to_gradients(const at::Tensor& slice, const std::vector<char>& used, bool widens);
};

/// @param widens  a sum has the parameter's dtype, whatever its terms have
void add_to_gradient(const at::Tensor& parameter, const at::Tensor& term, bool widens);

/// The buffer in which the gradients of one part gather as backward makes them, until the part is complete.
class FlatGradient {
 public:
  /// Whether anything has come.
  bool begun() const { return flat_.defined(); }
  /// Gives it memory, of the part's numel() elements of any floating-point dtype; its contents don't matter.
  void begin(const ShardedPart& part, at::Tensor flat);
  /// @return whether all members are there now.
  bool take(const ShardedMember& member, const at::Tensor& gradient);
  bool complete() const { return members_ > 0 && taken_ >= members_; }
  /// Zeros for the members that have not come.
  void fill(const ShardedPart& part);
  /// Whether a gradient of that member came, fill() or not.
  bool came(size_t member) const { return member < came_.size() && came_[member]; }

  const at::Tensor& flat() const { return flat_; }
  /// Gives the memory away; what came stays known.
  at::Tensor release() { return std::exchange(flat_, at::Tensor()); }

 private:
  at::Tensor flat_;
  std::vector<char> came_;
  size_t members_ = 0, taken_ = 0;
};

}  // namespace accelerate::parallel
