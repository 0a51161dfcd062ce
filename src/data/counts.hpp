#pragma once

#include "utils/counts.hpp"

namespace accelerate::data {

/// Events of batches and loaders; see utils/counts.hpp.
enum class DataCount {
  batches,             ///< that loops got from prepared loaders
  batches_split,       ///< of them, pieces of a global batch (split_batches)
  batches_dispatched,  ///< that rank 0 shared out
  dispatched_bytes,    ///< of them, on the way from rank 0
  stream_batches,      ///< of streams that each rank reads
  samples_repeated,    ///< to complete the last global batch
  uneven_passes,       ///< whose last global batch was left as it was
  loaders,             ///< prepared
  seedable_samplers,   ///< that took the place of a random one
  generators_sent,     ///< states of samplers' generators from rank 0, and of the default ones
  default_generators_sent,
  device_generators_sent,
  number_of_counts
};

}  // namespace accelerate::data
