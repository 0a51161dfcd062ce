#pragma once

/// Less memory for activations: run a part of the model again in backward instead of keeping what it saved
/// (`checkpoint`), or keep that elsewhere
/// (`ActivationOffload`). Both work on any model, through autograd's hooks on saved tensors, and give the gradients
/// that plain training gives, bit for bit.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/utils/export.hpp"
#include "accelerate/utils/nested.hpp"

namespace accelerate {

struct CheckpointOptions {
  /// Run again with the random numbers of the first run (CPU generator, the accelerator's generator of the device that
  /// was current, and generators that are given to operators: at::bernoulli(probs, my_generator)), and put the
  /// generators back afterwards. Closures that draw none keep no state. Closures that draw from a generator while other
  /// threads draw from it can't be repeated.
  bool preserve_rng_state = true;
  /// Stop running again as soon as the last tensor that backward needs is there: by an exception that passes through
  /// the closure. Off: the closure runs to its end.
  bool early_stop = true;
  /// "default": the tensors that are saved again must have the shapes, dtypes and devices of the first run. "none": not
  /// compared. Their number always is.
  std::string determinism_check = "default";
};

namespace detail {

/// The first run of a checkpointed closure: from construction to destruction, what operators of this thread save is
/// counted and not kept.
class ACCELERATE_API CheckpointedCall {
 public:
  /// @param run_again       runs the closure with these tensors in place of the ones in `inputs`
  /// @param own_generators  false: it sees to generators that operators get as arguments by itself
  CheckpointedCall(std::function<void(std::vector<at::Tensor>)> run_again, const std::vector<at::Tensor>& inputs,
                   const CheckpointOptions& options, bool own_generators = true);
  CheckpointedCall(const CheckpointedCall&) = delete;
  CheckpointedCall& operator=(const CheckpointedCall&) = delete;
  ~CheckpointedCall();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace detail

/// Activation checkpointing of any closure: returns `closure(inputs...)`, keeps none of the tensors that its operators
/// save for backward, and runs it again in backward when the first of them is needed.
///
///     auto y = checkpoint([block = block_, x] { return block->forward(x); });
///     auto y = checkpoint([block = block_](const at::Tensor& x) { return block->forward(x); }, {}, x);
///
/// @param closure  Returns anything, or nothing. Moved into the autograd graph and destroyed with it, hence captures
/// must be values (or outlive the backward pass) and must
///                 not hold what is computed from the result. It must do the same when it runs again: side effects
///                 happen twice (batch norm moves its running statistics twice, as in PyTorch), and may be cut short by
///                 early_stop. Early stop is a std::exception: a closure that catches everything must rethrow.
/// @param inputs   Tensors, or nested batches of them (nested.hpp), given to the closure by reference to const. Unlike
/// captures they are saved as an operator saves its inputs: an enclosing
///                 ActivationOffload moves them, and writing to them before backward is an error. They are not copied.
/// @return         What the closure returns. Gradients flow to all tensors that it used, inputs, captures and
/// parameters alike.
///
/// - With grad mode off the closure is simply called.
/// - Checkpoints nest to any depth: an inner one keeps nothing, neither its closure nor its captures, while the outer
/// one is in its first run.
/// - Each backward pass runs the closure again once (retain_graph, create_graph and torch::autograd::grad work as
/// without checkpoint), under the autocast state of the first run.
/// - Writing in place to a tensor that an operator of the closure saved (parameters and captured tensors included)
/// before backward is an error, as without checkpoint. Unnoticed
///   is a change to a captured tensor that no operator saved: what is computed from it is then computed from the new
///   values.
/// - Saved tensors may be asked for on any thread; a checkpoint runs again on the thread that asks first, while others
/// wait.
///
/// @throws ConfigError for an unknown determinism_check. In backward: ShapeError if the second run does not save what
/// the first one saved, naming the first difference, or if
///         a saved tensor was modified in place; whatever the closure throws. All leave the thread's state as it was,
///         and backward can be tried again if the graph is retained.
/// Source: torch.utils.checkpoint(use_reentrant=False).
template <class Closure, class... Inputs>
auto checkpoint(Closure closure, const CheckpointOptions& options = {}, const Inputs&... inputs) {
  if (!at::GradMode::is_enabled()) return closure(inputs...);
  std::vector<at::Tensor> tensors;
  (nested::for_each_tensor(inputs, [&](const at::Tensor& t) { tensors.push_back(t); }), ...);
  // The frame keeps the tensors in a form that enclosing hooks see; the structure around them stays here, empty.
  [[maybe_unused]] const auto without_tensors = [](const auto& input) {
    return nested::map_tensors(input, [](const at::Tensor&) { return at::Tensor(); });
  };
  auto shared = std::make_shared<Closure>(std::move(closure));
  detail::CheckpointedCall first_run(
      [shared, structure = std::tuple<Inputs...>{without_tensors(inputs)...}](std::vector<at::Tensor> values) {
        [[maybe_unused]] size_t next = 0;
        [[maybe_unused]] const auto fill = [&](const auto& input) {
          return nested::map_tensors(input, [&](const at::Tensor&) { return std::move(values[next++]); });
        };
        std::apply(
            [&](const auto&... empty) {
              std::apply([&](const auto&... filled) { static_cast<void>((*shared)(filled...)); },
                         std::tuple<Inputs...>{fill(empty)...});
            },
            structure);
      },
      tensors, options);
  tensors.clear();
  return (*shared)(inputs...);
}

struct ActivationOffloadOptions {
  /// A folder on a disk with room: tensors go to a file there, from any device. The file has no name (nothing is left
  /// after a crash) and shrinks in use as backward goes on. Unset: an accelerator's tensors go to host memory, and the
  /// CPU's stay, since they are there already: on a machine without an accelerator the scope then does nothing.
  std::optional<std::filesystem::path> directory;
  /// Smaller tensors stay. In bytes; at 64 KiB the fixed cost of a move (about 10 us for a hand-over and a system call
  /// or a kernel launch) equals that of the copy.
  int64_t min_bytes = int64_t{64} << 10;
  /// How much to fetch ahead in backward, in bytes: the tensors saved before the one that is asked for. 0: none.
  int64_t prefetch_bytes = int64_t{64} << 20;
  /// How much may wait to be written to the directory, in bytes, before saving another tensor waits: bounds the memory
  /// that a slow disk holds up.
  int64_t max_pending_bytes = int64_t{256} << 20;
  /// Host memory that an accelerator copies to without waiting. Off: ordinary memory, and copies that block.
  bool pin_memory = true;
  /// Tensors that must stay although nothing shows it, such as frozen weights (they need no gradient, and are kept in
  /// memory by the model anyway).
  std::function<bool(const at::Tensor&)> keep = {};
};

/// Counted per ActivationOffload since its construction.
struct ActivationOffloadStats {
  int64_t saved = 0;         ///< tensors that autograd saved within the scope
  int64_t kept = 0;          ///< of those: left where they are
  int64_t moved = 0;         ///< storages moved: one that several operators save is moved once
  int64_t bytes_moved = 0;   ///< their bytes
  int64_t alive = 0;         ///< fetches that needed no transfer because the original was still in use
  int64_t prefetched = 0;    ///< fetches that had been started ahead
  int64_t fetched_late = 0;  ///< fetches that backward had to start itself
};

/// From construction until close() or destruction, tensors that this thread's operators save for backward move to host
/// memory or to a file, and come back in backward, the next ones ahead of time. The original's memory is free as soon
/// as nobody else uses it and the copy is done.
///
///     ActivationOffload offload({.directory = "/scratch"});
///     auto loss = model->forward(x);
///     offload.close();
///     loss.backward();
///
/// Parameters (leaves that require a gradient), views of them, and members of the residency engine never move: they
/// have a home already. Sparse, quantized and meta tensors stay too. Writing in place to a saved tensor before backward
/// is an error (ShapeError), as without the scope. Scopes nest with each other and with `checkpoint`: the innermost one
/// decides. Close scopes on the thread that opened them, in reverse order.
/// @throws ConfigError for a negative number, or a directory that is missing; ResourceError, out of the operator that
/// saves or backward, when the disk is full or fails. Source: torch.autograd.graph.save_on_cpu, which has no prefetch,
/// moves parameters too and moves a tensor as often as it is saved.
class ACCELERATE_API ActivationOffload {
 public:
  explicit ActivationOffload(const ActivationOffloadOptions& options = {});
  ActivationOffload(const ActivationOffload&) = delete;
  ActivationOffload& operator=(const ActivationOffload&) = delete;
  ~ActivationOffload();
  /// Ends the scope; tensors already moved stay so. The object remains for stats().
  void close();
  ActivationOffloadStats stats() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace accelerate
