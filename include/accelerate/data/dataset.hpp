#pragma once

/// Data sets, from which loaders read. There are four kinds, told apart by their members:
///
/// | kind             | members                                                                                     |
/// |------------------|---------------------------------------------------------------------------------------------|
/// | LibTorch, map    | any torch::data::datasets::Dataset, also with .map(transforms); size() must be known        |
/// | LibTorch, stream | get_batch(size_t) giving a batch, or an optional one with reset(); else it ends after       |
/// |                  | size() samples                                                                              |
/// | map              | std::vector<T>, or `size()` and `get(i)` or `operator[](i)`                                 |
/// | stream           | `std::optional<Sample> next()` and `reset()`; optionally `size()` (samples), `skip(n)`, and |
/// |                  | `shard(rank, world_size)`, after which it reads only that rank's share                      |
///
/// Any kind may have `set_epoch(e)`. With worker threads, map data sets are read by several threads at once, so get()
/// must be thread-safe, as for LibTorch's own loader; streams are read by one thread at a time. Data sets are taken by
/// value, by std::shared_ptr, or by std::ref (which must then outlive the loader).
///
/// Each batch has a generator of its own, seeded by pass, rank (map data sets) and number of the batch. Data sets,
/// their transforms and the collate function draw from it where they ask for LibTorch's default CPU generator. So their
/// numbers are equal with any number of workers and after resuming, and the program's own numbers don't move. Other
/// generators are used as they are.

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/data/collate.hpp"
#include "accelerate/data/group_reader.hpp"
#include "accelerate/data/sampler.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::data {
namespace detail {

template <class T> inline constexpr bool is_optional = nested::detail::is_instance<T, std::optional>;
template <class T> struct Unwrapped { using type = T; };
template <class T> struct Unwrapped<std::optional<T>> { using type = T; };

template <class D> concept LibTorchDataset = requires(D& d) {
  typename D::BatchRequestType;
  d.get_batch(std::declval<typename D::BatchRequestType>());
};
template <class D> concept LibTorchStream = LibTorchDataset<D> && std::is_same_v<typename D::BatchRequestType, size_t>;
template <class D> concept PlainStream = !LibTorchDataset<D> && requires(D & d) {
  d.reset();
  requires is_optional<decltype(d.next())>;
};
template <class D> concept Stream = LibTorchStream<D> || PlainStream<D>;
template <class D> concept HasGet = requires(D& d, size_t i) { d.get(i); };
template <class D> concept PlainMap = !LibTorchDataset<D> && !PlainStream<D> && requires(D & d) {
  static_cast<int64_t>(d.size());
}
&&(HasGet<D> || requires(D & d, size_t i) { d[i]; });
template <class D> concept CanShard = requires(D& d) { d.shard(int64_t{0}, int64_t{1}); };

}  // namespace detail

/// A type that a loader can read from.
template <class D>
concept DatasetLike = detail::LibTorchDataset<typename detail::Pointee<D>::type> ||
    detail::PlainStream<typename detail::Pointee<D>::type> || detail::PlainMap<typename detail::Pointee<D>::type>;

namespace detail {

/// The result of one read of the data set: a list of samples, or a batch that a transform such as Stack has collated
/// already.
template <class D> auto raw_type() {
  if constexpr (LibTorchDataset<D>) {
    return std::type_identity<typename Unwrapped<decltype(std::declval<D&>().get_batch(
        std::declval<typename D::BatchRequestType>()))>::type>{};
  } else if constexpr (PlainStream<D>) {
    return std::type_identity<std::vector<typename Unwrapped<decltype(std::declval<D&>().next())>::type>>{};
  } else if constexpr (HasGet<D>) {
    return std::type_identity<std::vector<std::remove_cvref_t<decltype(std::declval<D&>().get(size_t{0}))>>>{};
  } else {
    return std::type_identity<std::vector<std::remove_cvref_t<decltype(std::declval<D&>()[size_t{0}])>>>{};
  }
}
template <class D> using Raw = typename decltype(raw_type<D>())::type;
template <class T> inline constexpr bool is_sample_list = false;
template <class T> inline constexpr bool is_sample_list<std::vector<T>> = true;

struct DefaultCollate {
  template <class T> collated_t<T> operator()(std::vector<T> samples) const { return collate(samples); }
};

/// No struct whose members nobody finds.
template <class T> struct IsNoHiddenStruct : std::bool_constant<!(std::is_aggregate_v<T> && std::is_class_v<T>)> {};

/// Checks that samples of a data set can be collated, where they are collated by default.
template <class D> constexpr void check_samples() {
  using R = Raw<typename Pointee<D>::type>;
  if constexpr (is_sample_list<R>)
    static_assert(nested::all_leaves<typename R::value_type, IsNoHiddenStruct>,
                  "the members of this struct can't be found, so its samples can't become tensors: declare "
                  "ACCELERATE_FIELDS(first, second, ...) in it, or pass a collate function to the loader");
}

/// The batch type of a data set (as passed: by value, shared_ptr or reference_wrapper) with a collate function.
template <class D, class Collate = DefaultCollate> auto batch_type() {
  using R = Raw<typename Pointee<D>::type>;
  if constexpr (is_sample_list<R>) return std::type_identity<std::remove_cvref_t<std::invoke_result_t<Collate&, R>>>{};
  else return std::type_identity<R>{};
}
template <class D, class Collate = DefaultCollate> using batch_of = typename decltype(batch_type<D, Collate>())::type;

template <class D> std::optional<int64_t> size_of(const D& dataset) {
  if constexpr (requires { dataset.size().has_value(); }) {
    const auto size = dataset.size();
    return size ? std::optional<int64_t>(static_cast<int64_t>(*size)) : std::nullopt;
  } else if constexpr (requires { static_cast<int64_t>(dataset.size()); }) {
    return static_cast<int64_t>(dataset.size());
  } else {
    return std::nullopt;
  }
}

}  // namespace detail

struct IterableDatasetShardOptions {
  int64_t batch_size = 1;
  /// Leave out a last global batch that is not full instead of completing it with samples of the first one.
  bool drop_last = false;
  int64_t num_processes = 1;
  int64_t process_index = 0;
  /// true: batch_size is the global one. false: it is a rank's.
  bool split_batches = false;
};

namespace detail {
/// @throws ConfigError when split_batches asks for a batch size that ranks can't share.
ACCELERATE_API StreamPlan shard_plan(const IterableDatasetShardOptions& options);
}  // namespace detail

/// One rank's samples of a stream: every rank reads everything and keeps its share of each global batch. A stream
/// itself. Conformance: iterable_dataset_shard.json.
template <class D>
requires detail::PlainStream<typename detail::Pointee<D>::type>
class IterableDatasetShard {
  using Dataset = typename detail::Pointee<D>::type;
  using Sample = typename detail::Raw<Dataset>::value_type;

 public:
  /// @throws ConfigError when split_batches is set and batch_size is no multiple of num_processes.
  IterableDatasetShard(D dataset, const IterableDatasetShardOptions& options)
      : dataset_(detail::Pointee<D>::share(std::move(dataset))), plan_(detail::shard_plan(options)) {}

  void reset() {
    dataset_->reset();
    reader_.reset();
    share_.clear();
    at_ = 0;
  }
  std::optional<Sample> next() {
    if (at_ == share_.size()) {
      int64_t got = 0;
      share_ = reader_.read([this] { return dataset_->next(); }, plan_, got);
      at_ = 0;
      if (share_.empty()) return std::nullopt;
    }
    return std::move(share_[at_++]);
  }
  /// Samples that this rank gets, where the data set knows its size.
  std::optional<int64_t> size() const {
    const auto all = detail::size_of(*dataset_);
    if (!all) return std::nullopt;
    return (*all / plan_.group + (*all % plan_.group != 0 && !plan_.drop_last)) * (plan_.end - plan_.begin);
  }

 private:
  std::shared_ptr<Dataset> dataset_;
  detail::StreamPlan plan_;
  detail::GroupReader<Sample> reader_;
  std::vector<Sample> share_;
  size_t at_ = 0;
};

}  // namespace accelerate::data
