#pragma once

/// What a loader reads from. Four kinds of data sets, told apart by their members:
///
/// | kind            | members |
/// |-----------------|--------------------------------------------------------------------------------------------------|
/// | LibTorch, map   | any torch::data::datasets::Dataset, also with .map(transforms); size() must be known | |
/// LibTorch, stream| get_batch(size_t) giving a batch, or an optional one with reset(); else it ends after size()
/// samples | | map             | std::vector<T>, or `size()` and `get(i)` or `operator[](i)` | | stream          |
/// `std::optional<Sample> next()` and `reset()`; optionally `size()` (samples), `skip(n)`, and `shard(rank,
/// world_size)`, after which it reads only that rank's share |
///
/// Any kind may have `set_epoch(e)`. With worker threads, map data sets are read by several threads at once, so get()
/// must be thread-safe, as for LibTorch's own loader; streams are read by one thread at a time. Data sets are taken by
/// value, by std::shared_ptr, or by std::ref (which must then outlive the loader).

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/util/ArrayRef.h>

#include "accelerate/data/collate.hpp"
#include "accelerate/data/pass.hpp"
#include "accelerate/data/rows.hpp"
#include "accelerate/data/sampler.hpp"
#include "accelerate/utils/error.hpp"

namespace accelerate::data {
namespace detail {

template <class T> inline constexpr bool is_optional = nested::detail::is_instance<T, std::optional>;
template <class T> struct Unwrapped { using type = T; };
template <class T> struct Unwrapped<std::optional<T>> { using type = T; };

template <class D>
concept LibTorchDataset = requires(D& d) {
  typename D::BatchRequestType;
  d.get_batch(std::declval<typename D::BatchRequestType>());
};
template <class D>
concept LibTorchStream = LibTorchDataset<D> && std::is_same_v<typename D::BatchRequestType, size_t>;
template <class D>
concept PlainStream = !LibTorchDataset<D> && requires(D & d) {
  d.reset();
  requires is_optional<decltype(d.next())>;
};
template <class D>
concept Stream = LibTorchStream<D> || PlainStream<D>;
template <class D>
concept HasGet = requires(D& d, size_t i) {
  d.get(i);
};
template <class D>
concept PlainMap = !LibTorchDataset<D> && !PlainStream<D> && requires(D & d) {
  static_cast<int64_t>(d.size());
}
&&(HasGet<D> || requires(D & d, size_t i) { d[i]; });
template <class D>
concept CanShard = requires(D& d) {
  d.shard(int64_t{0}, int64_t{1});
};

/// What one read of the data set gives: a list of samples, or a batch that a transform such as Stack has collated
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

/// The samples at `indices`, as a batch.
template <class Batch, class D, class Collate>
Batch fetch(D& dataset, Collate& collate_samples, const Indices& indices) {
  if constexpr (LibTorchDataset<D>) {
    // int64_t and size_t may alias; indices are never negative.
    const c10::ArrayRef<size_t> request(reinterpret_cast<const size_t*>(indices.data()), indices.size());
    if constexpr (is_sample_list<Raw<D>>) return collate_samples(dataset.get_batch(request));
    else return dataset.get_batch(request);
  } else {
    Raw<D> samples;
    samples.reserve(indices.size());
    for (const int64_t index : indices) {
      if constexpr (HasGet<D>) samples.push_back(dataset.get(static_cast<size_t>(index)));
      else samples.push_back(dataset[static_cast<size_t>(index)]);
    }
    return collate_samples(std::move(samples));
  }
}

/// How a pass reads a stream: `group` samples per step, of which [begin, end) are this rank's.
struct StreamPlan {
  int64_t group = 1, begin = 0, end = 1;
  int64_t chunk = 1;                 ///< samples per request to a LibTorch stream
  bool complete = false;             ///< complete a short last group with samples of the first one
  bool drop_last = false;            ///< leave a short last group out
  int64_t rank = 0, world_size = 1;  ///< what a stream that shards itself is told; 1: nothing
};

/// Takes a rank's share of group after group. Keeps the first group when a short last one is to be completed.
template <class Sample> class GroupReader {
 public:
  void reset() {
    first_.clear();
    first_known_ = ended_ = false;
  }

  /// This rank's share; empty at the end. `got` is how many samples the group had.
  template <class Next> std::vector<Sample> read(Next&& next, const StreamPlan& plan, int64_t& got) {
    std::vector<Sample> mine;
    got = 0;
    if (ended_) return mine;
    mine.reserve(static_cast<size_t>(plan.end - plan.begin));
    const bool remember = plan.complete && !first_known_;
    while (got < plan.group) {
      std::optional<Sample> sample = next();
      if (!sample) {
        ended_ = true;
        break;
      }
      if (remember) first_.push_back(*sample);
      if (got >= plan.begin && got < plan.end) mine.push_back(std::move(*sample));
      ++got;
    }
    first_known_ = first_known_ || got > 0;
    if (got == plan.group) return mine;
    if (plan.drop_last || got == 0) mine.clear();
    else if (plan.complete)
      for (int64_t i = std::max(got, plan.begin); i < plan.end; ++i)
        mine.push_back(first_[static_cast<size_t>(i - got) % first_.size()]);
    return mine;
  }

 private:
  std::vector<Sample> first_;
  bool first_known_ = false, ended_ = false;
};

/// A stream with its type erased.
template <class Batch> class StreamSource {
 public:
  virtual ~StreamSource() = default;
  virtual std::optional<int64_t> size() const = 0;
  virtual bool can_shard() const = 0;
  virtual void set_epoch(int64_t epoch) = 0;
  /// Back to the start, then past `skip` steps.
  virtual void reset(const StreamPlan& plan, int64_t skip) = 0;
  virtual std::optional<Part<Batch>> read(const StreamPlan& plan) = 0;
};

template <class D> class StreamBase {
 public:
  explicit StreamBase(std::shared_ptr<D> dataset) : dataset_(std::move(dataset)) {}

 protected:
  void rewind(const StreamPlan& plan) {
    if constexpr (CanShard<D>)
      if (plan.world_size > 1) dataset_->shard(plan.rank, plan.world_size);
    if constexpr (requires(D & d) { d.reset(); }) dataset_->reset();
    given_ = 0;
  }

  /// The next list or batch of a LibTorch stream, of at most `chunk` samples; nothing at the end.
  std::optional<Raw<D>> request(int64_t chunk) requires LibTorchStream<D> {
    if constexpr (is_optional<decltype(dataset_->get_batch(size_t{1}))>) {
      return dataset_->get_batch(static_cast<size_t>(chunk));
    } else {
      // Such a stream has no end of its own: size() samples are one pass, or an empty batch ends it.
      const auto size = size_of(*dataset_);
      if (size) chunk = std::min(chunk, *size - given_);
      if (chunk <= 0) return std::nullopt;
      Raw<D> raw = dataset_->get_batch(static_cast<size_t>(chunk));
      const int64_t rows = [&] {
        if constexpr (is_sample_list<Raw<D>>) return static_cast<int64_t>(raw.size());
        else return rows_of(raw);
      }();
      given_ += rows;
      if (rows == 0) return std::nullopt;
      return raw;
    }
  }

  std::shared_ptr<D> dataset_;
  int64_t given_ = 0;
};

/// A stream of samples.
template <class D, class Batch, class Collate> class SampleStream final : public StreamSource<Batch>, StreamBase<D> {
  using Sample = typename Raw<D>::value_type;

 public:
  SampleStream(std::shared_ptr<D> dataset, Collate collate_samples)
      : StreamBase<D>(std::move(dataset)), collate_(std::move(collate_samples)) {}
  std::optional<int64_t> size() const override { return size_of(*this->dataset_); }
  bool can_shard() const override { return CanShard<D>; }
  void set_epoch(int64_t epoch) override {
    if constexpr (requires(D & d) { d.set_epoch(epoch); }) this->dataset_->set_epoch(epoch);
  }

  void reset(const StreamPlan& plan, int64_t skip) override {
    this->rewind(plan);
    reader_.reset();
    buffer_.clear();
    if (skip > 0 && plan.complete) {  // the first group may be needed at the end
      int64_t got = 0;
      reader_.read([&] { return next(plan.chunk); }, plan, got);
      --skip;
    }
    int64_t samples = skip * plan.group;
    if constexpr (requires(D & d) { d.skip(samples); }) {
      if (samples > 0) this->dataset_->skip(samples);
    } else {
      while (samples-- > 0 && next(plan.chunk)) {
      }
    }
  }

  std::optional<Part<Batch>> read(const StreamPlan& plan) override {
    int64_t got = 0;
    auto samples = reader_.read([&] { return next(plan.chunk); }, plan, got);
    if (samples.empty()) return std::nullopt;
    return Part<Batch>{collate_(std::move(samples)), plan.drop_last ? -1 : got % plan.group};
  }

 private:
  std::optional<Sample> next(int64_t chunk) {
    if constexpr (PlainStream<D>) {
      return this->dataset_->next();
    } else {
      if (buffer_.empty()) {
        auto raw = this->request(chunk);
        if (!raw || raw->empty()) return std::nullopt;
        buffer_ = std::move(*raw);
        std::reverse(buffer_.begin(), buffer_.end());
      }
      Sample sample = std::move(buffer_.back());
      buffer_.pop_back();
      return sample;
    }
  }

  Collate collate_;
  GroupReader<Sample> reader_;
  std::vector<Sample> buffer_;
};

/// A LibTorch stream whose batches are collated already: ranks take rows of them.
template <class D, class Batch> class BatchStream final : public StreamSource<Batch>, StreamBase<D> {
 public:
  explicit BatchStream(std::shared_ptr<D> dataset) : StreamBase<D>(std::move(dataset)) {}
  std::optional<int64_t> size() const override { return size_of(*this->dataset_); }
  bool can_shard() const override { return CanShard<D>; }
  void set_epoch(int64_t epoch) override {
    if constexpr (requires(D & d) { d.set_epoch(epoch); }) this->dataset_->set_epoch(epoch);
  }
  void reset(const StreamPlan& plan, int64_t skip) override {
    this->rewind(plan);
    first_.reset();
    ended_ = false;
    while (skip-- > 0 && read(plan)) {
    }
  }

  std::optional<Part<Batch>> read(const StreamPlan& plan) override {
    std::vector<Batch> batches;
    int64_t got = 0;
    while (!ended_ && got < plan.group) {
      auto batch = this->request(std::min(plan.chunk, plan.group - got));
      ended_ = !batch;
      if (!batch) break;
      got += rows_of(*batch);
      batches.push_back(std::move(*batch));
    }
    if (got == 0 || (got < plan.group && plan.drop_last)) return std::nullopt;
    Batch group = concat_rows(batches);
    if (plan.complete && !first_) first_ = group;
    if (plan.complete && got < plan.group) group = complete_rows(group, *first_, plan.group);
    const int64_t rows = rows_of(group);
    const bool all = plan.begin == 0 && plan.end >= rows;
    return Part<Batch>{all ? group : slice_rows(group, plan.begin, std::min(plan.end, rows), rows),
                       plan.drop_last ? -1 : got % plan.group};
  }

 private:
  std::optional<Batch> first_;
  bool ended_ = false;
};

}  // namespace detail

/// A type that a loader can read from.
template <class D>
concept DatasetLike = detail::LibTorchDataset<typename detail::Pointee<D>::type> ||
    detail::PlainStream<typename detail::Pointee<D>::type> || detail::PlainMap<typename detail::Pointee<D>::type>;

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
