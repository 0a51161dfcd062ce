#pragma once

/// The settings that every run has: accumulation, loaders, project folder, process group, autocast. The other keyword
/// handlers of the reference are in kwargs.hpp. Source: reference features table, section 1.6.

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace accelerate {

/// The divisor of a gradient that was summed over micro-steps and ranks.
enum class GradientAverage {
  steps,   ///< num_steps x num_processes, as the reference does, also for a short last group
  tokens,  ///< the number of items that `backward(loss, num_items)` was told, summed over micro-steps and ranks: every
           ///< token weighs the same
};

struct GradientAccumulationPlugin {
  /// Micro-steps per optimizer step. The environment's ACCELERATE_GRADIENT_ACCUMULATION_STEPS wins over `Accelerator`'s
  /// own default, never over a plugin.
  int64_t num_steps = 1;
  /// Count a schedule's step also on micro-steps that do not step the optimizer (last_epoch stays, the internal step
  /// count moves).
  bool adjust_scheduler = true;
  /// Synchronise at the end of a loader even in the middle of a group.
  bool sync_with_dataloader = true;
  /// Communicate on every micro-step (less memory with sharded engines, more traffic). `sync_gradients` and the
  /// optimizer are not affected.
  bool sync_each_batch = false;
  /// Extension: see GradientAverage.
  GradientAverage average = GradientAverage::steps;
};

struct DataLoaderConfiguration {
  /// true: a loader's batch_size is the global one and each rank gets a slice. false: each rank gets batches of
  /// batch_size.
  bool split_batches = false;
  /// Rank 0 reads and sends the others their part. Unset: true for streams, false for indexed data sets.
  std::optional<bool> dispatch_batches;
  /// Complete the last global batch with samples from the start, so that every rank does the same number of steps.
  bool even_batches = true;
  /// Shuffle with SeedableRandomSampler: the order depends on seed and epoch only.
  bool use_seedable_sampler = false;
  /// Seed of that sampler; unset: LibTorch's default generator's initial seed.
  std::optional<int64_t> data_seed;
  /// Copy to the device without waiting (with pinned memory).
  bool non_blocking = false;
  /// Checkpoints of save_state() hold where the prepared loaders stand, in the middle of a pass, and load_state() takes
  /// them back there. (state_dict() and load_state_dict() every loader has whatever is set here.)
  bool use_stateful_dataloader = false;
};

struct ProjectConfiguration {
  std::filesystem::path project_dir;
  /// Empty: project_dir.
  std::filesystem::path logging_dir;
  /// save_state() without a folder writes project_dir/checkpoints/checkpoint_<n>.
  bool automatic_checkpoint_naming = false;
  /// Keep at most this many complete ones, at least 1; the oldest goes first.
  std::optional<int64_t> total_limit;
  /// Number of the next automatic checkpoint.
  int64_t iteration = 0;
  /// Each machine writes its own copy (no shared file system).
  bool save_on_each_node = false;
};

/// Which generator is meant.
enum class RNGType {
  torch,   ///< LibTorch's default CPU generator
  device,  ///< the default generator of this rank's current accelerator (CUDA, XPU, ...); nothing where there is none
  generator,  ///< a generator that is passed along, usually a sampler's
};

struct InitProcessGroupKwargs {
  /// "gloo", "nccl" or "mpi"; empty: nccl where the device is CUDA and it is built in, else gloo.
  std::string backend;
  /// How ranks find each other: "env://" or empty is by MASTER_ADDR and MASTER_PORT, "tcp://host:port" by these.
  std::string init_method;
  /// Longest wait for a peer in one collective. Unset: 600 s with nccl, else 1800 s.
  std::optional<std::chrono::milliseconds> timeout;
};

struct AutocastKwargs {
  bool enabled = true;
  std::optional<bool> cache_enabled;
};

}  // namespace accelerate
