#pragma once

/// Loaders of a distributed program: which rank sees what, on which device, when the end is near, and where to resume.
/// Source: reference features table 1.4; conformance: prepared_dataloader.json, collective_ops.json ("shuffled"),
/// skip_batches.json.

#include <c10/core/Device.h>

#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/data/batch_iterator.hpp"
#include "accelerate/data/forward.hpp"
#include "accelerate/data/loader.hpp"
#include "accelerate/data/prepared_status.hpp"
#include "accelerate/data/random.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/kwargs.hpp"

namespace accelerate::data {

/// A loader that `prepare` has made ready for this rank: its share of the data, on its device.
///
/// It reads one batch ahead, so that `end_of_dataloader()` is true while the loop holds the last batch. Starting a pass
/// is collective (generators are synchronised, sizes of data and the first samples of the order compared: ConfigError
/// on all ranks where they differ, CommError where another rank failed), and with dispatching every batch is. Streams
/// that shard themselves are asked for their share and exchange one small message per step; with even_batches = false
/// they exchange nothing and ranks may do different numbers of steps. Copies are cheap and share their state. Leaving
/// the loop early is fine; starting a new pass ends the one that runs, whose loop gets a ConfigError when it asks for
/// its next batch.
template <class Batch> class PreparedDataLoader {
 public:
  using batch_type = Batch;
  /// @param status  of a loader whose batches are `Batch`es
  explicit PreparedDataLoader(std::shared_ptr<PreparedStatus> status) : status_(std::move(status)) {}

  BatchIterator<Batch> begin() const { return BatchIterator<Batch>(status_->start()); }
  std::default_sentinel_t end() const { return {}; }

  /// Batches of a pass on this rank. @throws ConfigError when it can't be known.
  int64_t size() const { return detail::known(status_->size(), "size()"); }
  /// Samples per step over all ranks. @throws ConfigError when batches vary in size.
  int64_t total_batch_size() const { return detail::known(status_->total_batch_size(), "total_batch_size()"); }
  /// Samples of a pass over all ranks. @throws ConfigError when unknown.
  int64_t total_dataset_length() const {
    return detail::known(status_->total_dataset_length(), "total_dataset_length()");
  }
  /// Chooses the epoch of the next pass, for samplers and data sets that depend on it.
  void set_epoch(int64_t epoch) { status_->set_epoch(epoch); }
  int64_t iteration() const { return status_->iteration(); }
  bool end_of_dataloader() const { return status_->end_of_dataloader(); }
  int64_t remainder() const { return status_->remainder(); }

  /// The position of the loop: the next pass of a loader that loads this gives exactly the batches that the loop has
  /// not got, in the same order.
  DataLoaderState state_dict() const { return status_->state_dict(); }
  void load_state_dict(const DataLoaderState& state) { status_->load_state_dict(state); }

  bool override_even_batches(std::optional<bool> even) { return status_->override_even_batches(even); }
  /// The part that does not depend on the type of the batches.
  const std::shared_ptr<PreparedStatus>& status() const { return status_; }

 private:
  std::shared_ptr<PreparedStatus> status_;
};

struct PrepareDataLoaderOptions {
  DataLoaderConfiguration config = {};
  /// Batches come on `device`.
  bool put_on_device = true;
  /// Unset: PartialState's device.
  std::optional<at::Device> device = std::nullopt;
  /// Unset: PartialState's. Dispatching needs the real ones.
  std::optional<int64_t> num_processes = std::nullopt;
  std::optional<int64_t> process_index = std::nullopt;
  /// Generators that get rank 0's state at the start of each pass. `generator` is the sampler's.
  std::vector<RNGType> rng_types = {RNGType::generator};
};

namespace detail {
ACCELERATE_API std::shared_ptr<PreparedStatus> prepare(const AnyDataLoader& loader,
                                                       const PrepareDataLoaderOptions& options,
                                                       SliceFunction<AnyBatch> slice);
}  // namespace detail

/// Makes a loader ready for this rank. Shuffled loaders of several ranks get a generator of their own, seeded from
/// LibTorch's default one, which `begin()` synchronises. Not collective. `dispatch_batches` unset means: dispatch
/// streams that can't shard themselves, when put_on_device is set.
/// @throws ConfigError for settings that contradict each other or the loader (split_batches without a batch size that
/// ranks can share, a sampler that gives one rank's part already, ...).
template <class Batch>
PreparedDataLoader<Batch> prepare_data_loader(const DataLoader<Batch>& loader,
                                              const PrepareDataLoaderOptions& options = {},
                                              std::type_identity_t<SliceFunction<Batch>> slice_fn_for_dispatch = {}) {
  SliceFunction<detail::AnyBatch> slice;
  if (slice_fn_for_dispatch)
    slice = [slice = std::move(slice_fn_for_dispatch)](const detail::AnyBatch& batch, auto... rows_and_ranks) {
      return detail::any_batch(slice(detail::batch_as<Batch>(batch), rows_and_ranks...));
    };
  return PreparedDataLoader<Batch>(detail::prepare(loader, options, std::move(slice)));
}

/// A loader that leaves out the first steps of each pass and goes on with the same epoch. The original is not changed.
template <class Batch>
PreparedDataLoader<Batch> skip_first_batches(const PreparedDataLoader<Batch>& loader, int64_t num_batches) {
  return PreparedDataLoader<Batch>(loader.status()->skipping(num_batches));
}

}  // namespace accelerate::data
