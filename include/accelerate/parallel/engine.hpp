#pragma once

/// How ranks train a model together: `Accelerator::prepare` gives it to an engine. All that the facade, clipping and
/// checkpoints know of that is here. It is a stack of layers (src/parallel/layer.hpp), one for each technique;
/// src/parallel/engines.cpp lists those that a program can ask for.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/parallel/held.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::comm {
class Group;
}  // namespace accelerate::comm

namespace accelerate::parallel {

class Layer;

/// All members are collective, called by all ranks in the same order, unless they say otherwise.
class ACCELERATE_API Engine final {
 public:
  /// @param layers  in the order of the stack, at least one; each has been given what those before have left
  explicit Engine(std::vector<std::unique_ptr<Layer>> layers);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const std::vector<std::unique_ptr<Layer>>& layers() const { return layers_; }

  // A training step.

  void before_forward();
  /// `outputs`: the tensors of the model's result.
  void after_forward(const std::vector<at::Tensor>& outputs);
  /// The forward is over, also when it threw; after_forward() may have come before. Not collective.
  void leave_forward() noexcept;
  /// `run` is the backward of one loss, with all that goes with it; layers may put it off to a later call, at the
  /// latest to settle_gradients().
  void backward(const std::function<void()>& run);
  /// Right before a backward of `loss` that may go through the model. Not collective.
  void before_backward(const at::Tensor& loss);
  /// Whether this parameter of the model stays the same on all ranks when optimizers step on it: false for one that was
  /// registered after the engine was made. Not collective.
  bool averages(const at::Tensor& parameter) const;
  /// Whether the latest backward gave gradients to parameters of the model. Not collective.
  bool took_part() const;
  /// Right after a backward in which the model took part, or no model did.
  void after_backward();
  /// Around each optimizer step that happens, and around changes of the shards by others (loading a checkpoint).
  void before_step();
  /// Before that, of a step on these parameters, or shards, whose list is asked for where settings want a gradient of
  /// each. Collective there. @throws ConfigError that names those of which no rank has one
  void expect_gradients(const std::function<std::vector<at::Tensor>()>& stepped_on);
  void after_step();

  /// The dtype that floating-point inputs of the forward are converted to; unset: they come as they are. Not
  /// collective.
  std::optional<at::ScalarType> input_dtype() const;
  /// The dtype that floating-point results of the forward are converted to; unset: as mixed precision has them. Not
  /// collective.
  std::optional<at::ScalarType> output_dtype() const;
  /// False where parameters have bytes only while operators use them: nobody may keep copies of them (autocast's cache)
  /// in the hope that the original stays. Not collective.
  bool keeps_parameters() const;

  // Accumulation.

  /// Why each backward averages, whatever is asked for (ZeRO's stages 2 and 3 keep no whole gradients); null: it need
  /// not. Not collective.
  const char* always_reduces() const;
  /// Whether backward averages gradients over ranks. Off: they only accumulate locally. Not collective.
  bool require_backward_grad_sync() const;
  void set_require_backward_grad_sync(bool value);
  /// After forwards without synchronisation: makes the next backward synchronise all the same. Not collective.
  void prepare_backward_sync();
  /// Parameters have been given gradients that micro-steps without synchronisation left before a checkpoint was saved:
  /// they count as if these micro-steps had just been. Not collective, but for all ranks alike.
  void resume_accumulation();
  /// Before gradients of a synchronising step are looked at: averages what micro-steps without synchronisation have
  /// left and no backward has averaged since, because it did not go through the model.
  void settle_gradients();

  // Optimizers that step part by part, see Layer.

  std::vector<std::vector<at::Tensor>> step_parts() const;
  void place_state(const at::Tensor& parameter, const at::Tensor& state);
  void before_part(size_t part, const std::vector<at::Tensor>& states);
  void after_part(size_t part, const std::vector<at::Tensor>& states);
  /// Whether optimizers step within backward (step_at_once).
  bool steps_at_once() const;
  void set_step(const std::function<void(const std::vector<at::Tensor>&)>& step);
  /// Whether optimizers compute their steps within backward, as far as they can (step_in_backward).
  bool steps_ahead() const;
  void set_step_ahead(const std::function<void(const std::vector<at::Tensor>&)>& step);

  // Replicas that train apart for a while, see LocalSGD.

  /// From here on gradients are not averaged between replicas (data parallelism: each rank; hybrid sharding: the ranks
  /// that hold the model together), or are again. @throws ConfigError where there is one replica only.
  /// Not collective, but for all ranks alike.
  void set_apart(bool apart);
  /// The number of this rank's replica while they train apart; unset otherwise. Not collective.
  std::optional<int64_t> apart() const;
  /// The ranks that hold in the other replicas what this one holds in its own, in the replicas' order; nullptr where
  /// there is one replica only. Owned by the engine. Not collective.
  comm::Group* replicas() const;

  /// Whether the next forward takes rank 0's buffers on all ranks. Not collective.
  bool shares_buffers() const;
  /// As it was when a checkpoint was saved, whose buffers of each rank are there again. Not collective, but for all
  /// ranks alike.
  void set_shares_buffers(bool value);

  // Tensors as this rank holds them.

  /// The tensors of which it holds shards, in the order in which gather_each() makes them whole. Not collective.
  std::vector<Held> pieces() const;
  /// The gradient of a parameter among shards(), or of such a shard, without names; its value is undefined where
  /// backward has not reached it. Nothing for other tensors. Not collective.
  std::optional<Held> gradient(const at::Tensor& parameter) const;
  /// Somebody has cleared the gradient of what is held of a parameter (Held::value). Not collective.
  void clear_gradient(const at::Tensor& held);
  /// Whether ranks hold different shards at all, the same on all ranks: then norms are of all ranks' together. Not
  /// collective.
  bool holds_pieces() const;

  /// A tensor that was made whole from the shards that ranks hold of it: a parameter, or something that lies in shards
  /// just as a parameter does (its gradient, a moment of Adam).
  struct Whole {
    std::string name;      ///< of the parameter
    at::Tensor parameter;  ///< the module's
    at::Tensor value;      ///< of its sizes, in the shards' dtype; undefined where nobody has a shard
  };
  /// This rank's shard of what is to become whole, of the sizes of `shard`. Undefined on all ranks alike: leave out.
  using ShardOf = std::function<at::Tensor(const at::Tensor& parameter, const at::Tensor& piece)>;
  /// Makes tensors whole, part by part, and hands them over in the order of shards(). Peak memory is one part.
  /// @param everywhere  false: only rank 0 is called back.
  void gather_each(const ShardOf& piece_of, const std::function<void(const Whole&)>& take, bool everywhere) const;

  // Ranks with different numbers of batches, see join().

  /// From here on ranks may take different numbers of steps. @throws ConfigError where a layer can't do that.
  void begin_join();
  void end_join() noexcept;
  /// A rank without data does its share of one step of the others. @return whether gradients were averaged in it;
  /// nothing when no rank trains any more. @throws ConfigError on all ranks where some average and some don't.
  std::optional<bool> shadow_step();
  /// All get the model of the rank `source`.
  void finish_join(int64_t source);

 private:
  const Layer* cutting() const;  ///< the last one that cuts; null: none
  Layer* stepping() const;       ///< the layer whose parts optimizers step on; null: none
  std::vector<std::unique_ptr<Layer>> layers_;
};

/// Of the models of one program; null stands for a model without an engine.
using Engines = std::vector<std::shared_ptr<Engine>>;

}  // namespace accelerate::parallel
