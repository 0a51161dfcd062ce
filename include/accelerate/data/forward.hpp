#pragma once

/// Loaders by name only, for headers that pass them on: who makes one includes data.hpp.

#include <cstdint>

namespace accelerate::data {

template <class Batch> class DataLoader;
template <class Batch> class PreparedDataLoader;
class PreparedStatus;
struct PrepareDataLoaderOptions;

}  // namespace accelerate::data

namespace accelerate::detail {

// Found where the loader's type is complete: at the call.
template <class Batch>
auto prepare_loader(const data::DataLoader<Batch>& loader, const data::PrepareDataLoaderOptions& options) {
  return prepare_data_loader(loader, options);
}
template <class Loader> auto skip_batches(const Loader& loader, int64_t num_batches) {
  return skip_first_batches(loader, num_batches);
}

}  // namespace accelerate::detail
