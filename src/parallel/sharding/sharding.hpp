#pragma once

/// Sharded data parallelism: each rank keeps a part of the parameters, gradients and optimizer states; units of
/// parameters are whole only while they are computed with. A policy of the residency engine: the user's modules stay as
/// they are. Which units, which ranks, which dtypes: ShardingSettings says it, and no plugin is known here.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"
#include "parallel/layer.hpp"
#include "parallel/sharding/settings.hpp"

namespace accelerate::parallel {

/// Knows a model only by its tensors. The constructor is collective: all ranks bring the same parameters in the same
/// order (rank 0's values with from_rank0); it takes them over. Afterwards parameters, and
/// their gradients after a backward that averaged, are whole to every operator: reading them is collective, what is
/// written acts once, on this rank's shard at once. Optimizers step on the shards.
/// @throws ShapeError naming the first parameter whose name, shape or dtype differs between ranks, CommError,
/// ResourceError. Source: arXiv:2304.11277 (FSDP), arXiv:1910.02054 (ZeRO).
class ACCELERATE_API Sharding final : public Layer {
 public:
  /// @param given  what layers before have left of the parameters: boxes, which are sharded in place of the whole,
  /// where they are the module's tensors themselves
  Sharding(const ModelRef& model, const at::Device& device, ShardingSettings settings, const std::vector<Held>& given);
  ~Sharding() override;

  std::string name() const override { return "sharding"; }

  void before_forward() override;
  void after_forward(const std::vector<at::Tensor>& outputs) override;
  void leave_forward() noexcept override;
  void before_backward(const at::Tensor& loss) override;
  bool averages(const at::Tensor& parameter) const override;
  bool took_part() const override;
  void after_backward() override;
  void before_step() override;
  void expect_gradients(const std::function<std::vector<at::Tensor>()>& stepped_on) override;
  void after_step() override;
  std::vector<std::vector<at::Tensor>> step_parts() const override;
  void place_state(const at::Tensor& parameter, const at::Tensor& state) override;
  void before_part(size_t group, const std::vector<at::Tensor>& states) override;
  void after_part(size_t group, const std::vector<at::Tensor>& states) override;
  bool before_ahead(size_t group, const std::vector<at::Tensor>& states) override;
  void after_ahead(size_t group, const std::vector<at::Tensor>& states) override;
  bool is_elsewhere(const at::Tensor& tensor) const override;
  bool take_ahead(size_t group, bool divides) override;
  void after_take(size_t group) override;
  bool steps_at_once() const override;
  void set_step(std::function<void(const std::vector<at::Tensor>&)> step) override;
  bool steps_ahead() const override;
  void set_step_ahead(std::function<void(const std::vector<at::Tensor>&)> step) override;
  std::optional<at::ScalarType> input_dtype() const override;
  std::optional<at::ScalarType> output_dtype() const override;
  bool keeps_parameters() const override { return false; }

  const char* always_reduces() const override;
  bool require_backward_grad_sync() const override;
  void set_require_backward_grad_sync(bool value) override;
  void prepare_backward_sync() override;
  void resume_accumulation() override;
  void settle_gradients() override;

  /// With the hybrid strategies the ranks of each shard group are a replica.
  void set_apart(bool apart) override;
  std::optional<int64_t> apart() const override;
  comm::Group* replicas() const override;

  std::string state_name() const override { return "gradients"; }
  bool cuts() const override { return true; }
  std::vector<Held> held() const override;
  std::optional<Held> gradient(const at::Tensor& parameter) const override;
  void clear_gradient(const at::Tensor& held) override;
  /// Only the first replica gathers, unless `everywhere`.
  void gather_each(const Engine::ShardOf& piece_of, const std::function<void(const Engine::Whole&)>& take,
                   bool everywhere) const override;

  void offload_states(const StatesToOffload& states) override;
  void reload_states(bool non_blocking) override;
  void expect_all_states_here(const char* operation) const override;

  void begin_join() override;

  /// With the hybrid strategies: which replica of the model this rank's shards belong to. Replica 0 writes and counts
  /// all that is there once per model. Not collective.
  int64_t replica() const;
  /// This rank's shard of a parameter: 1-D, possibly empty, with the averaged gradient after backward. Undefined for
  /// tensors that are not sharded here. Not collective.
  at::Tensor local_shard(const at::Tensor& parameter) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate::parallel
