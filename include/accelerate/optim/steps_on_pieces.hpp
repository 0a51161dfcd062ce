#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate::optim {

/// Says of an optimizer's class that with sharded models it steps on this rank's shards, and has states of these only;
/// any other steps on whole parameters, on all ranks alike, since norms, products and searches over shards would be
/// others. Classes derive from what says why they can: ElementWise, or AsksOtherRanks.
class ACCELERATE_API StepsOnShards {
 public:
  virtual ~StepsOnShards() = default;
};

/// Parameters of which each rank holds a shard, for an optimizer whose step needs more of them than that.
class ACCELERATE_API Shards {
 public:
  virtual ~Shards() = default;
  /// Whether a tensor that the optimizer steps on is a shard of a larger one.
  virtual bool has(const at::Tensor& parameter) const = 0;
  /// Those of the parameter that it is a shard of.
  virtual at::IntArrayRef whole_sizes(const at::Tensor& piece) const = 0;
  /// Sums over all elements of the parameter, of each rank's sums over its shard. Collective: ranks call it for the
  /// same parameters in the same order. @return of the sizes of `sums`
  virtual at::Tensor summed(const at::Tensor& piece, const at::Tensor& sums) const = 0;

  /// Something that needs whole tensors, by the number of a shard in a list.
  struct Job {
    std::function<at::Tensor(size_t number)> values;  ///< of this rank's shard, as large as that
    /// Makes a tensor of all ranks' values, which lie where their elements do: of the same sizes, contiguous. Called on
    /// one rank.
    std::function<at::Tensor(size_t number, const at::Tensor& whole)> make;
    std::function<void(size_t number, const at::Tensor& made)> take;  ///< this rank's shard of that
  };
  /// Ranks do the job together: each makes what comes of some of the parameters, of which it has one whole at a time.
  /// Calls of the job come in an order of its own, the same on all ranks. Collective, with shards of the same
  /// parameters in the same order.
  virtual void share_out(const std::vector<at::Tensor>& pieces, const Job& job) const = 0;
};

/// Says of an optimizer's class that it steps on shards, and asks the ranks that hold the rest of a parameter for what
/// it needs of the whole: a norm, a matrix. A second base beside torch::optim::Optimizer.
class ACCELERATE_API AsksOtherRanks : public StepsOnShards {
 public:
  /// From prepare(), where a model is sharded.
  void set_pieces(std::shared_ptr<const Shards> pieces) { pieces_ = std::move(pieces); }

 protected:
  /// Null for a parameter that is whole.
  const Shards* pieces_of(const at::Tensor& parameter) const {
    return pieces_ && pieces_->has(parameter) ? pieces_.get() : nullptr;
  }

 private:
  std::shared_ptr<const Shards> pieces_;
};

}  // namespace accelerate::optim
