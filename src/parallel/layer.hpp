#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/parallel/engine.hpp"
#include "accelerate/parallel/held.hpp"
#include "accelerate/parallel/offload_states.hpp"
#include "accelerate/utils/export.hpp"

namespace c10 {
struct IValue;
}

namespace accelerate::parallel {

/// One technique's share in how ranks train a model: averaging whole replicas, sharding them, and so on. An Engine is a
/// stack of layers. The first one gets the model's tensors, each next one what the one before has left of them on this
/// rank; one of them makes gradients those of all ranks (of the axes of the data).
///
/// Members are called by the engine in the order of the stack, those that undo something (after_forward(),
/// after_step(), widen()) in reverse, and all of them by all ranks in the same order unless they say otherwise. A layer
/// leaves all else as it is.
class ACCELERATE_API Layer {
 public:
  virtual ~Layer() = default;

  /// Its name in messages.
  virtual std::string name() const = 0;

  // A training step; see Engine for each.

  virtual void before_forward() {}
  virtual void after_forward(const std::vector<at::Tensor>& outputs) { static_cast<void>(outputs); }
  virtual void leave_forward() noexcept {}
  /// `run` is the backward of one loss, with all that goes with it (before_backward(), autograd, after_backward(), of
  /// every model). A layer that defers it keeps `run` and calls it later, with the synchronisation that was asked for
  /// when it came: all in the order in which they came, and within the call for the last micro-step of a group, or in
  /// settle_gradients(), at the latest.
  virtual void backward(const std::function<void()>& run) { run(); }
  virtual void before_backward(const at::Tensor& loss) { static_cast<void>(loss); }
  virtual bool averages(const at::Tensor& parameter) const {
    static_cast<void>(parameter);
    return true;
  }
  virtual bool took_part() const { return true; }
  /// A layer that cuts takes the gradients of what it was given to what it has left of it.
  virtual void after_backward() {}
  virtual void before_step() { settle_gradients(); }
  virtual void expect_gradients(const std::function<std::vector<at::Tensor>()>& /*stepped_on*/) {}
  /// A layer that cuts takes the values of what it has left back to what it was given.
  virtual void after_step() {}
  virtual std::optional<at::ScalarType> input_dtype() const { return std::nullopt; }
  virtual std::optional<at::ScalarType> output_dtype() const { return std::nullopt; }
  virtual bool keeps_parameters() const { return true; }

  // Accumulation.

  /// Why this layer can't leave gradients of a backward to be averaged later; null: it can.
  virtual const char* always_reduces() const { return nullptr; }
  virtual bool require_backward_grad_sync() const { return true; }
  virtual void set_require_backward_grad_sync(bool value) { static_cast<void>(value); }
  virtual void prepare_backward_sync() {}
  virtual void resume_accumulation() {}
  virtual void settle_gradients() {}

  // Optimizers that step part by part. Asked of the first layer that has parts.

  /// Tensors, of what this layer holds, on which optimizers step together: on one part after the other, and then on
  /// what is in none. Nothing: on all at once. Not collective.
  virtual std::vector<std::vector<at::Tensor>> step_parts() const { return {}; }
  /// Around each optimizer's step on a part, for what it keeps of the part's tensors (moments, of their sizes; none
  /// before its first step): its bytes may be elsewhere between the steps. Not where a step is skipped.
  virtual void before_part(size_t part, const std::vector<at::Tensor>& states) {
    static_cast<void>(part), static_cast<void>(states);
  }
  virtual void after_part(size_t part, const std::vector<at::Tensor>& states) {
    static_cast<void>(part), static_cast<void>(states);
  }
  /// A state that an optimizer of `parameter` has without a step, and whose values are still to come: it lies where
  /// after_part() would leave it. Not collective. @throws ResourceError where there is no room for it
  virtual void place_state(const at::Tensor& parameter, const at::Tensor& state) {
    static_cast<void>(parameter), static_cast<void>(state);
  }
  /// Whether this layer has optimizers step within backward, on a part as soon as its gradients are averaged. Then
  /// their step() finds no gradients of it.
  virtual bool steps_at_once() const { return false; }
  /// `step` steps on some of what this layer holds, now, for one that does so within backward, and clears the gradients
  /// that it has stepped on: none while gradients accumulate. @throws ConfigError (the function) with a loss scaler,
  /// which knows of an overflow when all gradients are there.
  virtual void set_step(std::function<void(const std::vector<at::Tensor>&)> step) { static_cast<void>(step); }

  // Optimizers that compute their steps while backward runs.

  /// Whether this layer has them do so.
  virtual bool steps_ahead() const { return false; }
  /// `step` computes the coming step on tensors that this layer holds, and changes nothing yet; see
  /// AcceleratedOptimizer::step_ahead(). The layer calls it within backward, whenever gradients are there.
  virtual void set_step_ahead(std::function<void(const std::vector<at::Tensor>&)> step) { static_cast<void>(step); }

  // Of a layer that has parts, too: `step` is called for one part at a time, and bytes of it are elsewhere. What has
  // its bytes in memory is for the optimizer to keep new values of; what is_elsewhere() gets them in its own place.

  /// Before the new values of a part are computed, as before_part(). @return false: they are not to be
  virtual bool before_ahead(size_t part, const std::vector<at::Tensor>& states) {
    static_cast<void>(part), static_cast<void>(states);
    return false;
  }
  /// Puts them beside the old ones, which are what everybody sees from here on.
  virtual void after_ahead(size_t part, const std::vector<at::Tensor>& states) {
    static_cast<void>(part), static_cast<void>(states);
  }
  virtual bool is_elsewhere(const at::Tensor& tensor) const { return static_cast<void>(tensor), false; }
  /// In place of a step on the part: new values become what it has, unless somebody may have changed anything that they
  /// were made of and is elsewhere. @param divides  gradients are about to be divided  @return whether they have
  virtual bool take_ahead(size_t part, bool divides) {
    return static_cast<void>(part), static_cast<void>(divides), false;
  }
  /// The optimizer has done the same with what it kept.
  virtual void after_take(size_t part) { static_cast<void>(part); }

  // Replicas that train apart for a while. Only a layer that has replicas() is asked.

  virtual void set_apart(bool apart) { static_cast<void>(apart); }
  virtual std::optional<int64_t> apart() const { return std::nullopt; }
  virtual comm::Group* replicas() const { return nullptr; }

  // State that each rank has for itself and a resumed run needs.

  /// Its name in files: one name for all layers of which a model has one, so that a state of another is refused.
  virtual std::string state_name() const { return name(); }
  virtual c10::IValue own_state() const;
  /// @throws CheckpointError: the default, for a state of a layer that has none
  virtual std::function<void()> stage_own_state(const c10::IValue& state);
  virtual bool shares_buffers() const { return false; }
  virtual void set_shares_buffers(bool value) { static_cast<void>(value); }

  // Tensors as this rank holds them.

  /// Whether it leaves ranks different shards of what it is given, the same on all ranks. Not collective.
  virtual bool cuts() const { return false; }
  /// These shards, with Held::tensor as it was given; the engine enters itself as Held::engine. Not collective.
  virtual std::vector<Held> held() const { return {}; }
  /// The gradient of a parameter among held(), or of such a shard, in Held::value, which is undefined where backward
  /// has not reached it; nothing for other tensors. Not collective.
  virtual std::optional<Held> gradient(const at::Tensor& parameter) const {
    static_cast<void>(parameter);
    return std::nullopt;
  }
  virtual void clear_gradient(const at::Tensor& held) { static_cast<void>(held); }
  /// The tensor that this layer was given, made of the part that it has left: of a parameter, or of a tensor that lies
  /// as a parameter does (a moment of Adam). @param held  of held()  @param shard  of the sizes of held.value
  virtual at::Tensor widen(const Held& held, const at::Tensor& piece) const;
  /// The same of all of held(), in its order, by a layer that can do better than one after the other: peak memory is
  /// one part. @param everywhere  false: only rank 0 needs what comes out
  virtual void gather_each(const Engine::ShardOf& piece_of, const std::function<void(const Engine::Whole&)>& take,
                           bool everywhere) const;

  // States that are away for a while. Asked of a layer that holds shards.

  struct StatesToOffload {
    std::vector<OffloadStateTypeEnum> which;
    std::vector<at::Tensor> optimizer_states;  ///< of what the layer holds, if they are among these
    bool pin_memory = true, non_blocking = false;
  };
  /// Moves them to the host. @throws ConfigError: the default
  virtual void offload_states(const StatesToOffload& states);
  virtual void reload_states(bool non_blocking) { static_cast<void>(non_blocking); }
  /// Before other values take the place of what the layer holds, or of what optimizers keep of it. Not collective.
  /// @throws ConfigError where any of it is away
  virtual void expect_all_states_here(const char* operation) const { static_cast<void>(operation); }

  // Ranks with different numbers of batches, see join().

  virtual void begin_join();  ///< @throws ConfigError: the default
  virtual void end_join() noexcept {}
  /// Asked of the layer that joins the data; see Engine.
  virtual std::optional<bool> shadow_step() { return std::nullopt; }
  virtual void finish_join(int64_t source) { static_cast<void>(source); }
};

/// The model's tensors as the first layer finds them: whole on all ranks. Not collective.
ACCELERATE_API std::vector<Held> whole_tensors(const NamedTensors& parameters);

}  // namespace accelerate::parallel
