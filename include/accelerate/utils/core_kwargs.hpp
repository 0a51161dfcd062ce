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
  /// Schedules count micro-steps that do not step the optimizer, too: last_epoch stays, the internal step count moves.
  bool adjust_scheduler = true;
  bool sync_with_dataloader = true;  ///< synchronise at the end of a loader even in the middle of a group
  /// Communicate on every micro-step: less memory where sharded, more traffic. Steps are the same.
  bool sync_each_batch = false;
  GradientAverage average = GradientAverage::steps;  ///< extension
};

struct DataLoaderConfiguration {
  /// true: a loader's batch_size is the global one and each rank gets a slice. false: it is the batches' of each rank.
  bool split_batches = false;
  /// Rank 0 reads and sends the others their part. Unset: true for streams, false for indexed data sets.
  std::optional<bool> dispatch_batches;
  bool even_batches = true;  ///< complete the last global batch by samples from the start: all ranks make equal steps
  bool use_seedable_sampler = false;  ///< shuffle with SeedableRandomSampler: the order depends on seed and epoch only
  std::optional<int64_t> data_seed;   ///< of that sampler; unset: LibTorch's default generator's initial seed
  bool non_blocking = false;          ///< copy to the device without waiting (with pinned memory)
  /// Checkpoints of save_state() hold where the prepared loaders stand, in the middle of a pass, and load_state() takes
  /// them back there. (state_dict() and load_state_dict() every loader has whatever is set here.)
  bool use_stateful_dataloader = false;
};

struct ProjectConfiguration {
  std::filesystem::path project_dir;
  std::filesystem::path logging_dir;         ///< empty: project_dir
  bool automatic_checkpoint_naming = false;  ///< save_state() writes project_dir/checkpoints/checkpoint_<n>
  std::optional<int64_t> total_limit;  ///< keep at most this many complete ones, at least 1; the oldest goes first
  int64_t iteration = 0;               ///< number of the next automatic checkpoint
  bool save_on_each_node = false;      ///< each machine writes its own copy (no shared file system)
  /// load_state() compares checksums, not only sizes. Unset: ACCELERATE_VERIFY_CHECKPOINTS, else true.
  std::optional<bool> verify_checkpoints;
  bool save_on_signal = false;  ///< SIGTERM or SIGUSR1: all ranks save and exit with 75 (docs/checkpoints.md)
};

enum class RNGType {
  torch,   ///< LibTorch's default CPU generator
  device,  ///< the default generator of this rank's current accelerator (CUDA, XPU, ...); nothing where there is none
  generator,  ///< a generator that is passed along, usually a sampler's
};

struct InitProcessGroupKwargs {
  std::string backend;  ///< "gloo", "nccl" or "mpi"; empty: nccl where the device is CUDA and it is built in, else gloo
  /// How ranks find each other: "env://" or empty is by MASTER_ADDR and MASTER_PORT, "tcp://host:port" by these.
  std::string init_method;
  std::optional<std::chrono::milliseconds> timeout;  ///< longest wait in a collective; unset: nccl 600 s, else 1800 s
};

struct AutocastKwargs {
  bool enabled = true;
  std::optional<bool> cache_enabled;
};

}  // namespace accelerate
