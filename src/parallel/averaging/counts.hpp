#pragma once

#include "utils/counts.hpp"

namespace accelerate::parallel {

/// Events of gradients and buffers that are averaged; see utils/counts.hpp.
enum class AveragingCount {
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
  number_of_counts
};

}  // namespace accelerate::parallel
