#pragma once

/// The loader of one process. `Accelerator::prepare` (or prepare_data_loader) makes the distributed one from it.

#include <ATen/core/Generator.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "accelerate/data/batch_iterator.hpp"
#include "accelerate/data/dataset.hpp"
#include "accelerate/data/sampler.hpp"
#include "accelerate/data/sources.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::data {

struct DataLoaderOptions {
  int64_t batch_size = 1;
  /// A new random order in each pass: the order that Python's loader has for the same generator state.
  bool shuffle = false;
  /// Leave out a last batch that is not full.
  bool drop_last = false;
  /// Threads that read and collate ahead. 0: the consumer's thread does it when a batch is asked for. Streams use one
  /// thread, however many are asked for.
  int64_t num_workers = 0;
  /// Batches read ahead per worker.
  int64_t prefetch_factor = 2;
  /// Copy batches to page-locked memory, for faster and asynchronous copies to an accelerator. Nothing happens where
  /// there is none.
  bool pin_memory = false;
  /// The generator of the random order; unset: LibTorch's default generator.
  std::optional<at::Generator> generator = std::nullopt;
  /// Instead of `generator`: a generator of its own with this seed.
  std::optional<int64_t> seed = std::nullopt;
};

namespace detail {

/// Data set, sampler and threads of a loader, shared by all loaders made from it.
class LoaderCore;
/// Called with the options, checked, and the size of the data set.
using MakeSampler = std::function<std::shared_ptr<AnyBatchSampler>(const DataLoaderOptions&, int64_t data_size)>;

/// How many loops of this process read a loader that was not prepared.
ACCELERATE_API int64_t unprepared_passes();

/// @throws ConfigError naming `what` when `value` is unset.
ACCELERATE_API int64_t known(const std::optional<int64_t>& value, const char* what);

}  // namespace detail

/// A loader, whatever the type of its batches.
class ACCELERATE_API AnyDataLoader {
 public:
  /// Batches of a pass. @throws ConfigError when the data set or the sampler does not know.
  int64_t size() const;
  const DataLoaderOptions& options() const;
  /// Samples of a full batch; nothing where a sampler of batches decides on each.
  std::optional<int64_t> batch_size() const;
  void set_epoch(int64_t epoch);

  /// For prepare_data_loader and skip_first_batches.
  const std::shared_ptr<detail::LoaderCore>& core() const { return core_; }
  int64_t skip() const { return skip_; }

 protected:
  /// @param make_sampler  empty: in order, or shuffled
  AnyDataLoader(std::shared_ptr<detail::MapSource> source, DataLoaderOptions options,
                const detail::MakeSampler& make_sampler);
  AnyDataLoader(std::shared_ptr<detail::StreamSource> source, DataLoaderOptions options,
                const detail::MakeSampler& none);
  std::shared_ptr<detail::BatchCursor> start() const;

  std::shared_ptr<detail::LoaderCore> core_;
  int64_t skip_ = 0;
};

/// Batches of a data set, in one process.
///
///     auto loader = accelerate::data::DataLoader(dataset, {.batch_size = 16, .shuffle = true, .num_workers = 2});
///     for (auto& batch : loader) ...
///
/// `Batch` follows from the data set and the collate function (see dataset.hpp and collate.hpp). Copies are cheap and
/// share data set, sampler and threads. Several passes over a map data set may run at the same time; a stream, and a
/// sampler of LibTorch, has one position, so one at a time: the earlier one gets a ConfigError. Use a loader from one
/// thread. An exception of the data set or the collate function
/// reaches the loop at the batch where it happened, as it was thrown, also from worker threads.
template <class Batch> class DataLoader : public AnyDataLoader {
 public:
  using batch_type = Batch;

  /// @throws ConfigError when a number is out of range, the size of a map data set is unknown, or a stream is to be
  /// shuffled.
  template <DatasetLike D>
  explicit DataLoader(D dataset, DataLoaderOptions options = {})
      : DataLoader(std::move(dataset), std::move(options), detail::DefaultCollate{}) {
    detail::check_samples<D>();
  }

  /// @param collate  `Batch collate(std::vector<Sample>)`; called by several workers at once.
  template <DatasetLike D, class Collate>
  DataLoader(D dataset, DataLoaderOptions options, Collate collate)
      : DataLoader(std::move(dataset), nullptr, std::move(options), std::move(collate)) {}

  /// With an own order of samples or batches; then `shuffle` must be off. A sampler of batches decides on batch sizes
  /// itself.
  template <DatasetLike D, SamplerLike S>
  DataLoader(D dataset, S sampler, DataLoaderOptions options = {})
      : DataLoader(std::move(dataset), std::move(sampler), std::move(options), detail::DefaultCollate{}) {
    detail::check_samples<D>();
  }

  template <DatasetLike D, class S, class Collate>
  requires(SamplerLike<S> || std::is_null_pointer_v<S>)
      DataLoader(D dataset, S sampler, DataLoaderOptions options, Collate collate)
      : AnyDataLoader(detail::make_source<Batch>(detail::Pointee<D>::share(std::move(dataset)), std::move(collate)),
                      std::move(options), sampler_maker<D>(sampler)) {}

  /// Says what a data set needs.
  template <class D, class Collate = detail::DefaultCollate>
  requires(!DatasetLike<D> && !std::derived_from<D, AnyDataLoader>) explicit DataLoader(const D&,
                                                                                        const DataLoaderOptions& = {},
                                                                                        Collate = {})
      : AnyDataLoader(std::shared_ptr<detail::MapSource>(), {}, {}) {
    static_assert(DatasetLike<D>,
                  "this is no data set: it needs size() and get(i) or operator[](i), or as a stream reset() and "
                  "std::optional<Sample> next(); accelerate/data/dataset.hpp has all kinds");
  }

  /// Starts a pass and reads its first batch.
  BatchIterator<Batch> begin() const { return BatchIterator<Batch>(start()); }
  std::default_sentinel_t end() const { return {}; }

  DataLoader skipping(int64_t num_batches) const {
    DataLoader copy = *this;
    copy.skip_ += num_batches;
    return copy;
  }

 private:
  template <class D, class S> static detail::MakeSampler sampler_maker(S& sampler) {
    if constexpr (std::is_null_pointer_v<S>) {
      return {};
    } else {
      static_assert(!detail::Stream<typename detail::Pointee<D>::type>,
                    "a stream decides on the order of its samples, so it takes no sampler");
      return [&sampler](const DataLoaderOptions& options, int64_t data_size) {
        return as_batch_sampler(std::move(sampler), options.batch_size, options.drop_last, data_size);
      };
    }
  }
};

template <DatasetLike D> DataLoader(D) -> DataLoader<detail::batch_of<D>>;
template <DatasetLike D> DataLoader(D, DataLoaderOptions) -> DataLoader<detail::batch_of<D>>;
template <DatasetLike D, class Collate>
DataLoader(D, DataLoaderOptions, Collate) -> DataLoader<detail::batch_of<D, Collate>>;
template <DatasetLike D, SamplerLike S> DataLoader(D, S) -> DataLoader<detail::batch_of<D>>;
template <DatasetLike D, SamplerLike S> DataLoader(D, S, DataLoaderOptions) -> DataLoader<detail::batch_of<D>>;
template <DatasetLike D, SamplerLike S, class Collate>
DataLoader(D, S, DataLoaderOptions, Collate) -> DataLoader<detail::batch_of<D, Collate>>;
// Of what is no data set: the constructor refuses it.
template <class D, class Collate = detail::DefaultCollate>
requires(!DatasetLike<D> && !std::derived_from<D, AnyDataLoader>)
    DataLoader(const D&, DataLoaderOptions = {}, Collate = {})
->DataLoader<at::Tensor>;

/// A loader that leaves out the first batches of every pass. Map data sets are not read for them.
template <class Batch> DataLoader<Batch> skip_first_batches(const DataLoader<Batch>& loader, int64_t num_batches) {
  return loader.skipping(num_batches);
}

}  // namespace accelerate::data
