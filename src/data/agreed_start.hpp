#pragma once

#include <cstdint>
#include <exception>
#include <optional>

#include "watched_sampler.hpp"

namespace accelerate::data::detail {

/// The message of a rank at the start of a pass that ranks share out by one order.
struct PassStart {
  int64_t seed = 0;                          ///< of what the pass reads
  std::optional<int64_t> dataset_size = {};  ///< where known
  std::optional<int64_t> num_batches = {};   ///< of all ranks, where known
  OrderSeen order = {};                      ///< empty for streams
  std::exception_ptr failed = nullptr;       ///< the order could not be drawn here
};

/// Makes sure that all ranks are about to share out the same samples. @return rank 0's seed. Collective.
/// @throws ConfigError, on all ranks and with the numbers of two of them, where data sets differ in size or orders
/// differ; CommError where another rank failed.
int64_t agree_on_start(const PassStart& mine);

}  // namespace accelerate::data::detail
