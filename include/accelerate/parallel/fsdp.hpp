#pragma once

/// Fully sharded data parallelism: each rank keeps a part of the parameters, gradients and optimizer states; units of
/// parameters are whole only while they are computed with. A policy of the residency engine: the user's modules stay as
/// they are.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/parallel/engine.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/utils/export.hpp"

namespace torch::optim {
class Optimizer;
}

namespace accelerate::parallel {

/// Knows a model only by its tensors. The constructor is collective: all ranks bring the same parameters in the same
/// order (rank 0's values where the plugin asks for sync_module_states); it takes them over. Afterwards a parameter's
/// `grad` is undefined after a synchronising backward: the averaged gradient belongs to the shards, which is what
/// optimizers step on.
/// @throws ShapeError naming the first parameter whose name, shape or dtype differs between ranks, CommError,
/// ResourceError. Source: arXiv:2304.11277 (FSDP), arXiv:1910.02054 (ZeRO).
class ACCELERATE_API FullyShardedDataParallel final : public Engine {
 public:
  /// @param plugin  resolved, see parallel::resolve().
  FullyShardedDataParallel(const ModelRef& model, const at::Device& device,
                           const FullyShardedDataParallelPlugin& plugin);
  ~FullyShardedDataParallel() override;

  void before_forward() override;
  void after_forward(const std::vector<at::Tensor>& outputs) override;
  void leave_forward() noexcept override;
  void after_backward() override;
  bool require_backward_grad_sync() const override;
  void set_require_backward_grad_sync(bool value) override;
  void prepare_backward_sync() override;

  const FullyShardedDataParallelPlugin& plugin() const;
  /// With the hybrid strategies: which replica of the model this rank's pieces belong to. What is written or counted
  /// once per model is done by replica 0. Not collective.
  int64_t replica() const;

  /// This rank's piece of a parameter: 1-D, possibly empty, with the averaged gradient after backward. Undefined for
  /// tensors that are not sharded here. Not collective.
  at::Tensor local_shard(const at::Tensor& parameter) const;
  /// A copy of those elements of `whole` that belong to local_shard(parameter): 1-D. @param whole  of the parameter's
  /// sizes. Not collective.
  at::Tensor piece_of(const at::Tensor& parameter, const at::Tensor& whole) const;
  /// Puts the pieces in the place of the parameters in all groups, with their settings. Not collective.
  /// @throws ConfigError for an optimizer that holds states of these parameters still (prepare() has moved those of the
  /// classes whose states it knows).
  void adopt(torch::optim::Optimizer& optimizer) const;
  /// Around each step of an optimizer that adopted pieces. Collective.
  void before_step();
  void after_step();

  /// A whole tensor of which each rank holds the piece that belongs to its piece of a parameter (the parameter itself,
  /// its gradient, a moment of Adam).
  struct Whole {
    std::string name;      ///< of the parameter
    at::Tensor parameter;  ///< the module's, for its sizes
    at::Tensor value;      ///< whole, of the parameter's sizes, in the pieces' dtype, on the pieces' device; undefined
                           ///< where nobody has a piece
  };
  /// Makes tensors whole, unit by unit, and hands them over in the order of the model's units. `piece_of(parameter,
  /// shard)` gives this rank's piece (undefined on all ranks alike: skipped). Collective; peak memory is one unit.
  /// @param everywhere  false: only rank 0 is called back.
  void gather_each(const std::function<at::Tensor(const at::Tensor& parameter, const at::Tensor& shard)>& piece_of,
                   const std::function<void(const Whole&)>& take, bool everywhere) const;
  /// Sets this rank's pieces from whole values. `value_of(name, parameter)`: undefined leaves the piece as it is. Not
  /// collective, but all ranks must do it before the next forward.
  void scatter_each(const std::function<at::Tensor(const std::string& name, const at::Tensor& parameter)>& value_of);

  /// Where this rank's piece of a parameter lies in it, in elements of the parameter in the order of its memory.
  struct Piece {
    std::string name;
    at::Tensor parameter, shard;
    int64_t begin = 0;  ///< shard.numel() elements from here
    int64_t part = 0;   ///< pieces of one part lie side by side, and gather_each makes them whole together
  };
  /// In the order of gather_each.
  std::vector<Piece> pieces() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate::parallel
