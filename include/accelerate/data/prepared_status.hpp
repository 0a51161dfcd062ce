#pragma once

/// A prepared loader as it is whatever the type of its batches: where it stands, and how that is saved and loaded.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "accelerate/data/batch_iterator.hpp"
#include "accelerate/state.hpp"
#include "accelerate/state/loader_status.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/nested.hpp"

namespace accelerate::data {

/// The position of a loader. It is equal on all ranks but for the default generator, so rank 0's may be loaded
/// everywhere, also by another number of ranks, see PreparedStatus::load_state_dict().
struct ACCELERATE_API DataLoaderState {
  /// Pass that the loader is in, or that comes next.
  int64_t iteration = 0;
  /// Batches of that pass that the training loop has got; what was read ahead does not count.
  int64_t batches_yielded = 0;
  /// The sampler's generator at the start of the pass (uint8); empty when it has none.
  at::Tensor sampler_rng_state;
  /// LibTorch's default CPU generator at the start of the pass; empty between passes.
  at::Tensor default_rng_state;
  /// Samples of the pass that came before those batches, when a run with other global batches gave them.
  int64_t samples_before = 0;
  /// Samples per step over all ranks; 0 when batches vary in size.
  int64_t total_batch_size = 0;
  /// Ranks that shared the pass; 0: nobody said, as in files of earlier versions.
  int64_t num_processes = 0;
  ACCELERATE_FIELDS(iteration, batches_yielded, sampler_rng_state, default_rng_state, samples_before, total_batch_size,
                    num_processes)

  /// A dictionary of the fields, for checkpoints.
  c10::IValue to_ivalue() const;
  /// @throws CheckpointError when a field is missing or has another type.
  static DataLoaderState from_ivalue(const c10::IValue& value);
};

/// The base of all prepared loaders. PreparedDataLoader owns it; Accelerator keeps these to save and load states. Not
/// thread-safe.
class ACCELERATE_API PreparedStatus : public LoaderStatus {
 public:
  /// Passes that have been completed, or the epoch that was set.
  virtual int64_t iteration() const = 0;
  virtual void set_iteration(int64_t iteration) = 0;
  /// set_iteration, also for samplers and data sets that depend on it.
  virtual void set_epoch(int64_t epoch) = 0;
  /// Batches of a pass on this rank, unset when that can't be known.
  virtual std::optional<int64_t> size() const = 0;
  /// Samples per step over all ranks, unset when batches vary in size.
  virtual std::optional<int64_t> total_batch_size() const = 0;
  /// Samples of a pass over all ranks, unset when unknown.
  virtual std::optional<int64_t> total_dataset_length() const = 0;
  virtual bool even_batches() const = 0;
  /// Replaces even_batches from the next pass on; unset: back to the configuration's. False for streams and dispatched
  /// loaders, which stay as they are.
  virtual bool override_even_batches(std::optional<bool> even) = 0;
  virtual bool is_stream() const = 0;
  virtual bool dispatches() const = 0;

  virtual DataLoaderState state_dict() const = 0;
  /// The next pass goes on where the state was taken, in the order of that pass. With another number of ranks or
  /// another batch size every sample that is left comes once, in global batches of this loader's size.
  /// @throws CheckpointError with both sides' numbers where that can't be: in the middle of a pass over a stream that
  /// shards itself, or of batches that a sampler of your own makes (unless they go up in steps of all ranks).
  virtual void load_state_dict(const DataLoaderState& state) = 0;

  /// Steps that are left out at the start of each pass.
  virtual int64_t skip() const = 0;
  /// A loader of the same data that leaves out so many more steps, with the same epoch.
  virtual std::shared_ptr<PreparedStatus> skipping(int64_t num_batches) const = 0;
  /// Starts a pass; the running one, if any, ends, and its cursor throws ConfigError. Collective. @throws ConfigError
  /// on all ranks where their orders or the sizes of their data differ; CommError where another rank failed.
  virtual std::shared_ptr<detail::BatchCursor> start() = 0;
};

}  // namespace accelerate::data
