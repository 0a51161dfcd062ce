#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

/// What happened in this process, counted where it happens; receipts (accelerate/utils/receipts.hpp) say from it what
/// each setting did. A count is one relaxed add.
namespace accelerate::counts {

enum class Count : size_t {
  // data
  batches,             ///< that loops got from prepared loaders
  batches_split,       ///< of them, pieces of a global batch (split_batches)
  batches_dispatched,  ///< that rank 0 shared out
  dispatched_bytes,    ///< of them, on the way from rank 0
  stream_batches,      ///< of streams that each rank reads
  tensors_moved,       ///< from batches to the device
  tensors_in_place,    ///< that lay there already
  samples_repeated,    ///< to complete the last global batch
  uneven_passes,       ///< whose last global batch was left as it was
  even_passes,         ///< that came out even by themselves
  loaders,             ///< prepared
  seedable_samplers,   ///< that took the place of a random one
  generators_sent,     ///< states of samplers' generators from rank 0, and of the default ones
  default_generators_sent,
  device_generators_sent,
  // DDP
  buffer_broadcasts,
  buffer_bytes,
  buffers_left_alone,     ///< forwards before which they would have been sent
  parameter_comparisons,  ///< over ranks (compare_parameters_every)
  gradient_buckets,       ///< reduced
  gradient_bytes,         ///< in them
  bytes_saved,            ///< by a narrower dtype on the wire
  bucket_bytes_most,      ///< the largest bucket
  gradients_most,         ///< bytes of all gradients of one model
  unused_searches,        ///< backwards before which unused parameters were looked for
  unused_parameters,      ///< that were found
  gradients_in_buckets,
  static_graphs,       ///< that were learnt
  buckets_wrapped,     ///< converted before a communication hook got them
  buckets_compressed,  ///< by PowerSGD
  user_hook_calls,
  // LocalSGD
  replica_averages,
  // FSDP
  units,
  units_shared,  ///< in memory that all ranks see
  elements_sharded,
  elements_converted,  ///< from the dtype in which they are kept to that of the computation
  elements_held,       ///< of them, here
  parameters_ignored,
  modules_initialised,
  tensors_from_rank0,
  bytes_from_rank0,
  buffers_converted,
  full_precision_units,
  parts_as_fp8,  ///< whose parameters travel so
  forwards_sharded,
  gradients_reduced,  ///< parts, over ranks
  gradient_elements,  ///< in them
  gradient_wire_bytes,
  low_precision_gradients,  ///< given to optimizers as they were reduced
  parts_offloaded,
  parts_pinned,
  units_recomputed,
  inputs_offloaded,  ///< from which units are recomputed
  fetches_most,      ///< under way at a time
  replica_gradients,
  // training
  micro_steps,
  synchronised_steps,
  early_synchronisations,  ///< in the middle of a group (sync_each_batch)
  loader_end_synchronisations,
  loader_ends_passed,  ///< in the middle of a group, without a synchronisation
  backwards,
  items,  ///< that losses were the mean of
  // optimizers and schedules
  optimizer_steps,
  steps_skipped,  ///< because gradients overflowed
  schedule_steps,
  schedule_steps_alone,  ///< without asking the optimizers
  schedule_counts,       ///< micro-steps that only counted
  // precision
  autocast_regions,
  regions_without_autocast,
  fp8_evaluations,  ///< forwards in evaluation mode with products in fp8
  // checkpoints
  checkpoints,
  automatic_checkpoints,  ///< that named themselves
  loader_positions,       ///< in them
  checkpoints_pruned,
  copies_on_nodes,  ///< checkpoints that a machine's first rank wrote besides rank 0
  whole_states,     ///< of sharded models, for the program
  whole_optimizer_states,
  trackers,
  // waiting of the training thread (utils/wait_clock.hpp); collectives on a GPU's streams don't block it
  comm_wait_ns,
  data_wait_ns,
  number_of_counts
};

inline constexpr size_t kCounts = static_cast<size_t>(Count::number_of_counts);

/// Zero at the start of the process.
extern std::array<std::atomic<int64_t>, kCounts> values;

inline std::atomic<int64_t>& of(Count what) { return values[static_cast<size_t>(what)]; }
/// Any thread.
inline void add(Count what, int64_t n = 1) { of(what).fetch_add(n, std::memory_order_relaxed); }
/// Keeps the largest.
inline void most(Count what, int64_t n) {
  auto& count = of(what);
  int64_t before = count.load(std::memory_order_relaxed);
  while (n > before && !count.compare_exchange_weak(before, n, std::memory_order_relaxed)) {
  }
}
inline int64_t read(Count what) { return of(what).load(std::memory_order_relaxed); }
/// All to zero. For tests.
void reset();

}  // namespace accelerate::counts
