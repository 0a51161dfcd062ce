#pragma once

/// What `Accelerator::prepare` gives a model to: one way in which ranks train it together. Averaging whole models
/// (ddp.hpp) and sharding them are engines; src/parallel/engines.cpp lists those that a program can ask for.
/// All that the facade, clipping and checkpoints know of an engine is here.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/parallel/held.hpp"
#include "accelerate/utils/export.hpp"

namespace c10 {
struct IValue;
}

namespace accelerate::comm {
class Group;
}

namespace accelerate::parallel {

/// All members are collective, called by all ranks in the same order, unless they say otherwise. An engine that holds
/// nothing in pieces leaves the members about pieces as they are.
class ACCELERATE_API Engine {
 public:
  virtual ~Engine() = default;

  // A training step.

  virtual void before_forward() = 0;
  /// `outputs`: the tensors of the model's result.
  virtual void after_forward(const std::vector<at::Tensor>& outputs) = 0;
  /// The forward is over, also when it threw; after_forward() may have come before. Not collective.
  virtual void leave_forward() noexcept {}
  /// Right before a backward of `loss` that may go through the model. Not collective.
  virtual void before_backward(const at::Tensor& loss) { static_cast<void>(loss); }
  /// Whether this parameter of the model stays the same on all ranks when optimizers step on it: false for one that was
  /// registered after the engine was made. Not collective.
  virtual bool averages(const at::Tensor& parameter) const {
    static_cast<void>(parameter);
    return true;
  }
  /// Whether the latest backward gave gradients to parameters of the model. Not collective.
  virtual bool took_part() const { return true; }
  /// Right after a backward in which the model took part, or no model did.
  virtual void after_backward() {}
  /// Around each optimizer step that happens, and around changes of the pieces by others (loading a checkpoint).
  virtual void before_step() { settle_gradients(); }
  virtual void after_step() {}

  /// What floating-point inputs of the forward are converted to; unset: they come as they are. Not collective.
  virtual std::optional<at::ScalarType> input_dtype() const { return std::nullopt; }
  /// What floating-point results of the forward are converted to; unset: as mixed precision has them. Not collective.
  virtual std::optional<at::ScalarType> output_dtype() const { return std::nullopt; }
  /// False where parameters have bytes only while operators use them: nobody may keep copies of them (autocast's cache)
  /// in the hope that the original stays. Not collective.
  virtual bool keeps_parameters() const { return true; }

  // Accumulation.

  /// Whether backward averages gradients over ranks. Off: they only accumulate locally. Not collective.
  virtual bool require_backward_grad_sync() const = 0;
  virtual void set_require_backward_grad_sync(bool value) = 0;
  /// After forwards without synchronisation: makes the next backward synchronise all the same. Not collective.
  virtual void prepare_backward_sync() = 0;
  /// Parameters have been given gradients that micro-steps without synchronisation left before a checkpoint was saved:
  /// they count as if these micro-steps had just been. Not collective, but for all ranks alike.
  virtual void resume_accumulation() {}
  /// Before gradients of a synchronising step are looked at: averages what micro-steps without synchronisation have
  /// left and no backward has averaged since, because it did not go through the model.
  virtual void settle_gradients() {}

  // Replicas that train apart for a while, see LocalSGD.

  /// From here on gradients are not averaged between replicas (data parallelism: each rank; hybrid sharding: the ranks
  /// that hold the model together), or are again. @throws ConfigError where there is one replica only (the default).
  /// Not collective, but for all ranks alike.
  virtual void set_apart(bool apart);
  /// The number of this rank's replica while they train apart; unset otherwise. Not collective.
  virtual std::optional<int64_t> apart() const { return std::nullopt; }
  /// The ranks that hold in the other replicas what this one holds in its own, in the replicas' order; nullptr where
  /// there is one replica only. Owned by the engine. Not collective.
  virtual comm::Group* replicas() const { return nullptr; }

  // What each rank knows for itself and a resumed run needs: what compression of gradients has lost, for example.

  /// None: nothing. Not collective.
  virtual c10::IValue own_state() const;
  /// Looks whether the state fits, and returns what takes it up. @throws CheckpointError. Not collective.
  virtual std::function<void()> stage_own_state(const c10::IValue& state);

  /// Whether the next forward takes rank 0's buffers on all ranks. Not collective.
  virtual bool shares_buffers() const { return false; }
  /// As it was when a checkpoint was saved, whose buffers of each rank are there again. Not collective, but for all
  /// ranks alike.
  virtual void set_shares_buffers(bool value) { static_cast<void>(value); }

  // What this rank holds.

  /// The tensors of which it holds pieces, in the order in which gather_each() makes them whole. Not collective.
  virtual std::vector<Held> pieces() const { return {}; }
  /// The gradient of a parameter among pieces(), or of such a piece, without names; its value is undefined where
  /// backward has not reached it. Nothing for other tensors. Not collective.
  virtual std::optional<Held> gradient(const at::Tensor& parameter) const;
  /// Somebody has cleared the gradient of what is held of a parameter (Held::value). Not collective.
  virtual void clear_gradient(const at::Tensor& held) { static_cast<void>(held); }
  /// Whether ranks hold different pieces at all, the same on all ranks: then norms are of all ranks' together. Not
  /// collective.
  virtual bool holds_pieces() const { return false; }

  /// A tensor that was made whole from the pieces that ranks hold of it: a parameter, or something that lies in pieces
  /// just as a parameter does (its gradient, a moment of Adam).
  struct Whole {
    std::string name;      ///< of the parameter
    at::Tensor parameter;  ///< the module's
    at::Tensor value;      ///< of its sizes, in the pieces' dtype; undefined where nobody has a piece
  };
  /// This rank's piece of what is to become whole, of the sizes of `piece`. Undefined on all ranks alike: leave out.
  using PieceOf = std::function<at::Tensor(const at::Tensor& parameter, const at::Tensor& piece)>;
  /// Makes tensors whole, part by part, and hands them over in the order of pieces(). Peak memory is one part.
  /// @param everywhere  false: only rank 0 is called back.
  virtual void gather_each(const PieceOf& piece_of, const std::function<void(const Whole&)>& take,
                           bool everywhere) const;

  // Ranks with different numbers of batches, see join().

  /// From here on ranks may take different numbers of steps. @throws ConfigError where the engine can't do that (the
  /// default). Not collective.
  virtual void begin_join();
  virtual void end_join() noexcept {}
  /// A rank without data does its share of one step of the others. @return whether gradients were averaged in it;
  /// nothing when no rank trains any more. @throws ConfigError on all ranks where some average and some don't.
  virtual std::optional<bool> shadow_step() { return std::nullopt; }
  /// All get the model of the rank `source`.
  virtual void finish_join(int64_t source);
};

/// Of the models of one program; null stands for a model without an engine.
using Engines = std::vector<std::shared_ptr<Engine>>;

}  // namespace accelerate::parallel
