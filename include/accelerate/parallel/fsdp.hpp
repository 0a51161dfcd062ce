#pragma once

/// Fully sharded data parallelism: each rank keeps a part of the parameters, gradients and optimizer states; units of
/// parameters are whole only while they are computed with. A policy of the residency engine: the user's modules stay as
/// they are.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/parallel/engine.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::parallel {

/// Knows a model only by its tensors. The constructor is collective: all ranks bring the same parameters in the same
/// order (rank 0's values where the plugin asks for sync_module_states); it takes them over. Afterwards parameters, and
/// their gradients after a backward that averaged, are whole to every operator: reading them is collective, what is
/// written acts once, on this rank's piece at once. Optimizers step on the pieces.
/// @throws ShapeError naming the first parameter whose name, shape or dtype differs between ranks, CommError,
/// ResourceError. Source: arXiv:2304.11277 (FSDP), arXiv:1910.02054 (ZeRO).
class ACCELERATE_API FullyShardedDataParallel final : public Engine {
 public:
  /// @param plugin       resolved, see parallel::resolve().
  /// @param fp8_weights  names of parameters of two or more dimensions that travel between ranks as fp8 (E4M3, scaled
  ///                     by the largest value of the whole parameter) and are decoded where they are used. Of no
  ///                     effect where nothing travels: alone, and where ranks share memory.
  /// @param compare_parameters_every  see DistributedDataParallelKwargs: replicas compare the pieces that they hold
  ///                     alike, and all ranks what they have written to parameters. 0: never.
  FullyShardedDataParallel(const ModelRef& model, const at::Device& device,
                           const FullyShardedDataParallelPlugin& plugin,
                           const std::vector<std::string>& fp8_weights = {}, int64_t compare_parameters_every = 0);
  ~FullyShardedDataParallel() override;

  void before_forward() override;
  void after_forward(const std::vector<at::Tensor>& outputs) override;
  void leave_forward() noexcept override;
  void before_backward(const at::Tensor& loss) override;
  bool averages(const at::Tensor& parameter) const override;
  bool took_part() const override;
  void after_backward() override;
  void before_step() override;
  void after_step() override;
  std::optional<at::ScalarType> input_dtype() const override;
  std::optional<at::ScalarType> output_dtype() const override;
  bool keeps_parameters() const override { return false; }

  bool require_backward_grad_sync() const override;
  void set_require_backward_grad_sync(bool value) override;
  void prepare_backward_sync() override;
  void resume_accumulation() override;
  void settle_gradients() override;

  /// With the hybrid strategies the ranks of each shard group are a replica.
  void set_apart(bool apart) override;
  std::optional<int64_t> apart() const override;
  void average_replicas(const std::vector<at::Tensor>& tensors) const override;

  std::vector<Held> pieces() const override;
  std::optional<Held> gradient(const at::Tensor& parameter) const override;
  void clear_gradient(const at::Tensor& held) override;
  bool holds_pieces() const override { return true; }
  /// Only the first replica gathers, unless `everywhere`.
  void gather_each(const PieceOf& piece_of, const std::function<void(const Whole&)>& take,
                   bool everywhere) const override;

  const FullyShardedDataParallelPlugin& plugin() const;
  /// With the hybrid strategies: which replica of the model this rank's pieces belong to. What is written or counted
  /// once per model is done by replica 0. Not collective.
  int64_t replica() const;
  /// This rank's piece of a parameter: 1-D, possibly empty, with the averaged gradient after backward. Undefined for
  /// tensors that are not sharded here. Not collective.
  at::Tensor local_shard(const at::Tensor& parameter) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate::parallel
