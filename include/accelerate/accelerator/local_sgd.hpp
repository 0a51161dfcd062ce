#pragma once

/// Replicas of a model that train apart, and meet now and then: less communication, where it is slow.

#include <cstdint>
#include <memory>
#include <optional>

#include "accelerate/accelerator.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The optimizer that steps on the average of the replicas: it takes the way from the last common parameters to this
/// average for a gradient. With lr 1 and momentum 0 the average is taken as it is. Source: DiLoCo (arXiv:2311.08105).
struct OuterOptimizer {
  double lr = 0.7;
  double momentum = 0.9;
  bool nesterov = true;
};

struct LocalSGDOptions {
  /// Steps between averages, at least 1.
  int64_t local_sgd_steps = 8;
  /// Off: models train together as ever, and step() only counts.
  bool enabled = true;
  /// Extension; unset: replicas take their average. Takes memory for two more copies of the trained parameters, in
  /// fp32.
  std::optional<OuterOptimizer> outer_optimizer = {};
};

/// While it lives gradients are not averaged between replicas: in data parallelism each rank trains by itself, in
/// hybrid sharding each shard group. Each `local_sgd_steps` calls of step(), and at its end, the trained parameters
/// become the same again. Buffers and optimizers' states stay each rank's own meanwhile; at its end all take what the
/// first replica's prepared optimizers remember, so that they go on alike. In fp16 all ranks agree in each step, by one
/// number, whether it is skipped, so that loss scales and schedules stay the same.
///
///     LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 8});
///     for (auto& batch : loader) {
///       accelerator.backward(loss_of(model(batch)));
///       optimizer.step();
///       optimizer.zero_grad();
///       local_sgd.step();
///     }
///
/// All ranks make it, call step() equally often and leave it together. save_state() within it holds each rank's
/// parameters and optimizers; load_state() within another one goes on exactly there. The accelerator outlives it.
/// Source: arXiv:1805.09767; the reference's LocalSGD.
class ACCELERATE_API LocalSGD {
 public:
  /// Alone it does nothing. @throws ConfigError where there are no replicas (FSDP without HYBRID_SHARD), for a model
  /// prepared in evaluation mode, within join_uneven_inputs, and with GradientAverage::tokens.
  template <class Model>
  LocalSGD(Accelerator& accelerator, const Prepared<Model>& model, const LocalSGDOptions& options = {})
      : LocalSGD(accelerator, model.core(), options) {}
  template <class Model>
  LocalSGD(Accelerator& accelerator, const Prepared<Model>& model, int64_t local_sgd_steps, bool enabled = true)
      : LocalSGD(accelerator, model.core(), LocalSGDOptions{.local_sgd_steps = local_sgd_steps, .enabled = enabled}) {}
  LocalSGD(const LocalSGD&) = delete;
  LocalSGD& operator=(const LocalSGD&) = delete;
  /// finish(), unless an exception unwinds: then nothing is averaged. May throw what finish() throws.
  ~LocalSGD() noexcept(false);

  /// After each step of the loop. Collective on each local_sgd_steps-th call: blocks for the other replicas then.
  /// @throws CommError; ConfigError on all ranks when they have made different numbers of steps.
  void step();
  /// Averages, and lets models train together again; a second call does nothing. Collective.
  void finish();
  /// Whether replicas train apart here.
  bool enabled() const;
  int64_t num_steps() const;

 private:
  LocalSGD(Accelerator& accelerator, const std::shared_ptr<detail::PreparedModel>& model,
           const LocalSGDOptions& options);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate
