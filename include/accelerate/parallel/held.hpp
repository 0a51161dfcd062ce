#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/comm/axes.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::comm {
class Mesh;
}  // namespace accelerate::comm

namespace accelerate::parallel {

class Engine;

/// Some elements of a tensor: a range of a box of it. None at all: `numel` is 0.
struct Slice {
  std::vector<int64_t> corner;  ///< indices of the box's first element
  std::vector<int64_t> sizes;   ///< of the box
  int64_t begin = 0;            ///< of the range, among the box's elements in the order of the tensor's memory
  int64_t numel = 0;            ///< of the range

  /// All of a tensor, or elements [begin, begin + numel) of it.
  static ACCELERATE_API Slice all_of(at::IntArrayRef sizes);
  static ACCELERATE_API Slice range(at::IntArrayRef sizes, int64_t begin, int64_t numel);
  bool operator==(const Slice&) const = default;
};

/// The rule by which ranks hold the pieces of a tensor. Tensors that are cut together lie one after the other, and
/// `members` ranks hold equal pieces of all of them: member p has elements [p * each, (p + 1) * each), thus elements
/// [p * each - begin, (p + 1) * each - begin) of the tensor, row by row, as far as it has them. Member p of replica w
/// is rank p * member_step + w * replica_step of the job. So who knows the rule knows what all ranks hold.
struct EqualShards {
  int64_t begin = 0;  ///< where the tensor's first element lies among those that are cut together
  int64_t each = 1;   ///< elements of one member
  int64_t members = 1;
  int64_t member_step = 1, replica_step = 1;
  bool operator==(const EqualShards&) const = default;
};

/// Bytes that are placed instead of a tensor that has none of its own: the codes of a weight in few bits. Frozen.
class StandIn {
 public:
  virtual ~StandIn() = default;
  /// From here on equal on all ranks that train the model together, as the first of them has it: all stand-ins of the
  /// model, with the first one that is asked. Collective.
  virtual void agree() = 0;
  /// All that it consists of, 1-D, memory of its own; after agree(). Not collective.
  virtual at::Tensor bytes() = 0;
  /// A layer has placed what bytes() gave: that tensor is where they are now, and so many processes hold them together.
  virtual void placed(const at::Tensor& bytes, int64_t sharers) = 0;
};

/// One tensor of a model as this rank holds it.
struct Held {
  std::vector<std::string> names;  ///< its own, and those of weights that are tied to it
  at::Tensor tensor;               ///< the module's, by which everybody knows it
  /// Of full sizes, and of the order in which their elements lie: the same tensor, or one without values (meta) where
  /// the module's is a part of it on each rank.
  at::Tensor whole;
  /// The values that this rank holds and optimizers step on: the slice's elements, in 1-D, or of its box's sizes where
  /// they are all of the box. It is the module's tensor itself where all ranks have that whole.
  at::Tensor value;
  Slice slice;
  comm::Axes cut = {};               ///< over which ranks hold other elements; over the rest of the axes, the same
  const comm::Mesh* mesh = nullptr;  ///< the mesh of these axes; null: the job's
  int64_t part = 0;                  ///< tensors of one part become whole together, see Engine::gather_each()
  const Engine* engine = nullptr;    ///< makes it whole; null: it is, on all ranks
  /// Unset: other ranks' slices follow no rule that this rank knows.
  std::optional<EqualShards> equal = std::nullopt;
  /// For the next layer: to be placed instead of the tensor. Null: the tensor itself is.
  std::shared_ptr<StandIn> stand_in = nullptr;

  bool in_pieces() const { return engine != nullptr; }
  /// Of the ranks that hold these very elements, this one writes and counts them.
  /// @param apart  axes over which ranks are on their own for now: each of them counts
  ACCELERATE_API bool counts(comm::Axes apart = {}) const;
};

/// Those elements of `whole`, a tensor of the sizes of `held.whole`, that are held: a copy of the sizes of
/// `held.value`. Not collective.
ACCELERATE_API at::Tensor slice_of(const Held& held, const at::Tensor& whole);
/// The other way round: those elements become `values`. @param values  of the sizes of `held.value`. Not collective.
ACCELERATE_API void put_into(const Held& held, const at::Tensor& values, const at::Tensor& whole);

}  // namespace accelerate::parallel
