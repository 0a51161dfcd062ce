#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "accelerate/data/prepared.hpp"
#include "loader_core.hpp"

namespace accelerate::data::detail {

/// The settings of prepare_data_loader, with nothing left open.
struct PreparedSettings {
  DataLoaderConfiguration config = {};
  std::optional<at::Device> device = std::nullopt;  ///< unset: batches stay where they are
  int64_t num_processes = 1, process_index = 0;
  bool dispatch = false;
  std::vector<RNGType> rng_types = {};
};

/// @throws ConfigError for settings that contradict each other or the loader.
PreparedSettings resolve(const PrepareDataLoaderOptions& options, const LoaderCore& core);
/// The sampler that a prepared loader uses: seedable where the configuration asks for it, with a generator of its own
/// where ranks must agree on an order. Null for null.
std::shared_ptr<AnyBatchSampler> prepared_sampler(std::shared_ptr<AnyBatchSampler> batches,
                                                  const PreparedSettings& settings);

}  // namespace accelerate::data::detail
