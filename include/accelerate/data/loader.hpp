#pragma once

/// The loader of one process. `Accelerator::prepare` (or prepare_data_loader) makes the distributed one from it.

#include <ATen/core/Generator.h>

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "accelerate/data/dataset.hpp"
#include "accelerate/data/pass.hpp"
#include "accelerate/data/sampler.hpp"
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
  /// Where the random order is drawn from; unset: LibTorch's default generator.
  std::optional<at::Generator> generator = std::nullopt;
  /// Instead of `generator`: a generator of its own with this seed.
  std::optional<int64_t> seed = std::nullopt;
};

namespace detail {

/// Checks the numbers and makes the generator that `seed` asks for. @throws ConfigError.
ACCELERATE_API DataLoaderOptions validated(DataLoaderOptions options);
ACCELERATE_API std::shared_ptr<AnyBatchSampler> default_sampler(int64_t data_size, const DataLoaderOptions& options);
[[noreturn]] ACCELERATE_API void throw_unsized(const char* what);
/// As Python's loader does at the start of each pass, so that a seeded program draws the same orders.
ACCELERATE_API void draw_base_seed(const std::optional<at::Generator>& generator);
ACCELERATE_API bool can_pin_memory();

/// What one pass reads.
struct PassPlan {
  std::shared_ptr<AnyBatchSampler> batches = nullptr;  ///< map data sets
  StreamPlan stream = {};                              ///< streams
  int64_t skip = 0;                                    ///< steps to leave out at the start
  bool draw_base_seed = true;
  std::optional<at::Generator> generator = std::nullopt;
};

/// Data set, sampler and threads of a loader, shared by all loaders made from it.
template <class Batch> class LoaderCore {
 public:
  DataLoaderOptions options;
  std::optional<int64_t> dataset_size;
  std::shared_ptr<AnyBatchSampler> batches;                           ///< map data sets
  std::shared_ptr<const std::function<Batch(const Indices&)>> fetch;  ///< map data sets; called by workers
  std::function<void(int64_t)> dataset_set_epoch;                     ///< map data sets
  std::shared_ptr<StreamSource<Batch>> stream;                        ///< streams

  bool is_stream() const { return stream != nullptr; }
  void set_epoch(int64_t epoch) {
    if (batches) batches->set_epoch(epoch);
    if (dataset_set_epoch) dataset_set_epoch(epoch);
    if (stream) stream->set_epoch(epoch);
  }
  /// The plan of a lone process.
  PassPlan whole() const {
    const int64_t n = options.batch_size;
    return {.batches = batches,
            .stream = {.group = n, .begin = 0, .end = n, .chunk = n, .drop_last = options.drop_last},
            .generator = options.generator};
  }
  std::optional<int64_t> num_batches() const {
    if (batches) return batches->size();
    if (!dataset_size) return std::nullopt;
    return options.drop_last ? *dataset_size / options.batch_size
                             : (*dataset_size + options.batch_size - 1) / options.batch_size;
  }
  /// Samples of a pass, when known.
  std::optional<int64_t> num_samples() const {
    if (batches)
      if (const auto samples = batches->num_samples()) return samples;
    return dataset_size;
  }

  std::shared_ptr<Pass<Batch>> start(const PassPlan& plan) {
    using Read = typename Pass<Batch>::Read;
    if (plan.draw_base_seed) draw_base_seed(plan.generator);
    const bool pin = options.pin_memory && can_pin_memory();
    const auto finish = [pin](std::optional<Part<Batch>> part) {
      if (pin && part)
        part->batch = nested::map_tensors(part->batch, [](const at::Tensor& t) { return ops::pin_memory(t); });
      return part;
    };
    std::function<Read()> next_read;
    if (stream) {
      next_read = [source = stream, plan = plan.stream, skip = plan.skip, begun = false, finish]() mutable -> Read {
        return [source, plan, finish, skip, reset = !std::exchange(begun, true)] {
          if (reset) source->reset(plan, skip);
          return finish(source->read(plan));
        };
      };
    } else {
      auto cursor = plan.batches->start();
      for (int64_t i = 0; i < plan.skip; ++i)
        if (!cursor()) break;
      next_read = [cursor = std::move(cursor), fetch = fetch, finish]() -> Read {
        auto indices = cursor();
        if (!indices) return {};
        return [indices = std::move(*indices), fetch, finish] {
          return finish(Part<Batch>{(*fetch)(indices), std::nullopt});
        };
      };
    }
    return std::make_shared<Pass<Batch>>(std::move(next_read), pool(), options.num_workers * options.prefetch_factor);
  }

 private:
  std::shared_ptr<WorkerPool> pool() {
    if (options.num_workers == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    if (!pool_) pool_ = std::make_shared<WorkerPool>(stream ? 1 : options.num_workers);
    return pool_;
  }

  std::mutex mutex_;
  std::shared_ptr<WorkerPool> pool_;  // last: joined before the rest goes
};

/// Input iterator over a source with `Batch* next()`, which gives null at the end. Copies share one position.
template <class Batch, class Source> class BatchIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;
  using pointer = Batch*;
  using reference = Batch&;

  BatchIterator() = default;
  explicit BatchIterator(std::shared_ptr<Source> source) : source_(std::move(source)), batch_(source_->next()) {}
  Batch& operator*() const { return *batch_; }
  Batch* operator->() const { return batch_; }
  BatchIterator& operator++() {
    batch_ = source_->next();
    return *this;
  }
  void operator++(int) { ++*this; }
  friend bool operator==(const BatchIterator& iterator, std::default_sentinel_t) { return iterator.batch_ == nullptr; }

 private:
  std::shared_ptr<Source> source_;
  Batch* batch_ = nullptr;
};

/// A pass that owns the batch which the loop body sees.
template <class Batch> struct PlainSource {
  explicit PlainSource(std::shared_ptr<Pass<Batch>> pass) : pass(std::move(pass)) {}
  Batch* next() {
    current.reset();
    current = pass->next();
    return current ? &current->batch : nullptr;
  }
  std::shared_ptr<Pass<Batch>> pass;
  std::optional<Part<Batch>> current;
};

}  // namespace detail

/// Batches of a data set, in one process.
///
///     auto loader = accelerate::data::DataLoader(dataset, {.batch_size = 16, .shuffle = true, .num_workers = 2});
///     for (auto& batch : loader) ...
///
/// `Batch` follows from the data set and the collate function (see dataset.hpp and collate.hpp). Copies are cheap and
/// share data set, sampler and threads. Several passes over a map data set may run at the same time; a stream has one
/// position, so one at a time. Use a loader from one thread. An exception of the data set or the collate function
/// reaches the loop at the batch where it happened, as it was thrown, also from worker threads.
template <class Batch> class DataLoader {
 public:
  using batch_type = Batch;

  /// @throws ConfigError when a number is out of range, the size of a map data set is unknown, or a stream is to be
  /// shuffled.
  template <DatasetLike D>
  explicit DataLoader(D dataset, DataLoaderOptions options = {})
      : DataLoader(std::move(dataset), std::move(options), detail::DefaultCollate{}) {}

  /// @param collate  `Batch collate(std::vector<Sample>)`; called by several workers at once.
  template <DatasetLike D, class Collate>
  DataLoader(D dataset, DataLoaderOptions options, Collate collate)
      : DataLoader(std::move(dataset), nullptr, std::move(options), std::move(collate)) {}

  /// With an own order of samples or batches; then `shuffle` must be off. A sampler of batches decides on batch sizes
  /// itself.
  template <DatasetLike D, SamplerLike S>
  DataLoader(D dataset, S sampler, DataLoaderOptions options = {})
      : DataLoader(std::move(dataset), std::move(sampler), std::move(options), detail::DefaultCollate{}) {}

  template <DatasetLike D, class S, class Collate>
  requires(SamplerLike<S> || std::is_null_pointer_v<S>)
      DataLoader(D dataset, S sampler, DataLoaderOptions options, Collate collate)
      : core_(std::make_shared<detail::LoaderCore<Batch>>()) {
    using T = typename detail::Pointee<D>::type;
    core_->options = detail::validated(std::move(options));
    auto shared = detail::Pointee<D>::share(std::move(dataset));
    core_->dataset_size = detail::size_of(*shared);
    if constexpr (detail::Stream<T>) {
      static_assert(std::is_null_pointer_v<S>, "a stream decides on the order of its samples, so it takes no sampler");
      if (core_->options.shuffle)
        throw ConfigError(
            "DataLoader: shuffle is set but the data set is a stream, expected false because only the stream knows its "
            "order; shuffle in its next(), e.g. from a buffer");
      if constexpr (detail::is_sample_list<detail::Raw<T>>)
        core_->stream =
            std::make_shared<detail::SampleStream<T, Batch, Collate>>(std::move(shared), std::move(collate));
      else core_->stream = std::make_shared<detail::BatchStream<T, Batch>>(std::move(shared));
    } else {
      if (!core_->dataset_size)
        throw ConfigError(
            "DataLoader: the data set's size() is unknown, expected a number because its samples are read by index; "
            "return it from size(), or write a stream with next() and reset()");
      if constexpr (std::is_null_pointer_v<S>) {
        core_->batches = detail::default_sampler(*core_->dataset_size, core_->options);
      } else {
        if (core_->options.shuffle)
          throw ConfigError(
              "DataLoader: shuffle is set and a sampler is passed, expected one of them because the sampler decides on "
              "the order");
        core_->batches = as_batch_sampler(std::move(sampler), core_->options.batch_size, core_->options.drop_last,
                                          core_->dataset_size);
      }
      if constexpr (requires(T & d) { d.set_epoch(int64_t{0}); })
        core_->dataset_set_epoch = [shared](int64_t epoch) { shared->set_epoch(epoch); };
      core_->fetch = std::make_shared<const std::function<Batch(const Indices&)>>(
          [shared, collate = std::make_shared<Collate>(std::move(collate))](const Indices& indices) {
            return detail::fetch<Batch>(*shared, *collate, indices);
          });
    }
  }

  /// Starts a pass and reads its first batch.
  auto begin() const {
    auto plan = core_->whole();
    plan.skip = skip_;
    return detail::BatchIterator<Batch, detail::PlainSource<Batch>>(
        std::make_shared<detail::PlainSource<Batch>>(core_->start(plan)));
  }
  std::default_sentinel_t end() const { return {}; }

  /// Batches of a pass. @throws ConfigError when the data set or the sampler does not know.
  int64_t size() const {
    const auto batches = core_->num_batches();
    if (!batches) detail::throw_unsized("size()");
    return std::max<int64_t>(*batches - skip_, 0);
  }
  const DataLoaderOptions& options() const { return core_->options; }
  void set_epoch(int64_t epoch) { core_->set_epoch(epoch); }

  /// For prepare_data_loader and skip_first_batches.
  const std::shared_ptr<detail::LoaderCore<Batch>>& core() const { return core_; }
  int64_t skip() const { return skip_; }
  DataLoader skipping(int64_t num_batches) const {
    DataLoader copy = *this;
    copy.skip_ += num_batches;
    return copy;
  }

 private:
  std::shared_ptr<detail::LoaderCore<Batch>> core_;
  int64_t skip_ = 0;
};

template <DatasetLike D> DataLoader(D) -> DataLoader<detail::batch_of<D>>;
template <DatasetLike D> DataLoader(D, DataLoaderOptions) -> DataLoader<detail::batch_of<D>>;
template <DatasetLike D, class Collate>
DataLoader(D, DataLoaderOptions, Collate) -> DataLoader<detail::batch_of<D, Collate>>;
template <DatasetLike D, SamplerLike S> DataLoader(D, S) -> DataLoader<detail::batch_of<D>>;
template <DatasetLike D, SamplerLike S> DataLoader(D, S, DataLoaderOptions) -> DataLoader<detail::batch_of<D>>;
template <DatasetLike D, SamplerLike S, class Collate>
DataLoader(D, S, DataLoaderOptions, Collate) -> DataLoader<detail::batch_of<D, Collate>>;

/// A loader that leaves out the first batches of every pass. Map data sets are not read for them.
template <class Batch> DataLoader<Batch> skip_first_batches(const DataLoader<Batch>& loader, int64_t num_batches) {
  return loader.skipping(num_batches);
}

}  // namespace accelerate::data
