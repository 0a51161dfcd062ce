#pragma once

/// Loaders by name only, for headers that pass them on: programs that make one include data.hpp.

#include <cstdint>
#include <functional>
#include <utility>

namespace accelerate::data {
template <class Batch> class DataLoader;
template <class Batch> class PreparedDataLoader;
class PreparedStatus;
struct PrepareDataLoaderOptions;

/// Cuts a rank's rows out of a dispatched batch. Default: rows [begin, end) of tensors and of lists without tensors.
template <class Batch>
using SliceFunction =
    std::function<Batch(const Batch& batch, int64_t begin, int64_t end, int64_t process_index, int64_t num_processes)>;

}  // namespace accelerate::data

namespace accelerate::detail {
// Found where the loader's type is complete: at the call.
template <class Batch>
auto prepare_loader(const data::DataLoader<Batch>& loader, const data::PrepareDataLoaderOptions& options,
                    data::SliceFunction<Batch> slice) {
  return prepare_data_loader(loader, options, std::move(slice));
}
template <class Loader> auto skip_batches(const Loader& loader, int64_t num_batches) {
  return skip_first_batches(loader, num_batches);
}
}  // namespace accelerate::detail
