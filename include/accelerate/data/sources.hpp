#pragma once

/// Data sets whose kind is erased, and with it the types of samples and batches: what the engines in src/data read
/// from.

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/data/batch_ops.hpp"
#include "accelerate/data/dataset.hpp"
#include "accelerate/data/group_reader.hpp"
#include "accelerate/data/sampler.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::data::detail {

class ACCELERATE_API Source {
 public:
  virtual ~Source() = default;
  /// Samples, when known.
  virtual std::optional<int64_t> size() const = 0;
  virtual void set_epoch(int64_t epoch) = 0;
  virtual const BatchOps& ops() const = 0;
};

class ACCELERATE_API MapSource : public Source {
 public:
  /// The samples at `indices`, as a batch. Called by several workers at once.
  virtual AnyBatch fetch(const Indices& indices) = 0;
};

using AtStep = std::function<void(int64_t step)>;

/// Has one position; used by one thread at a time.
class ACCELERATE_API StreamSource : public Source {
 public:
  virtual bool can_shard() const = 0;
  /// Back to the start, then past `skip` steps. `at_step(i)` is called before anything of the i-th of them is read.
  virtual void reset(const StreamPlan& plan, int64_t skip, const AtStep& at_step) = 0;
  /// This rank's share of the next step; nothing at the end.
  virtual std::optional<LoadedBatch> read(const StreamPlan& plan) = 0;
};

/// A stream whose batches come collated: ranks take rows of them.
class ACCELERATE_API CollatedStreamSource : public StreamSource {
 public:
  void reset(const StreamPlan& plan, int64_t skip, const AtStep& at_step) override;
  std::optional<LoadedBatch> read(const StreamPlan& plan) override;

 protected:
  virtual void rewind(const StreamPlan& plan) = 0;
  /// The next batch, of at most `chunk` samples; null at the end.
  virtual AnyBatch request(int64_t chunk) = 0;

 private:
  AnyBatch at_most(int64_t wanted, int64_t most);

  AnyBatch first_, rest_;  ///< of the pass; of what the stream gave beyond what was asked for
  bool ended_ = false;
};

/// The members that a source of any kind takes from its data set.
template <class Interface, class D, class Batch> class SourceOf : public Interface {
 public:
  explicit SourceOf(std::shared_ptr<D> dataset) : dataset_(std::move(dataset)) {}
  std::optional<int64_t> size() const override { return size_of(*dataset_); }
  void set_epoch(int64_t epoch) override {
    if constexpr (requires(D & d) { d.set_epoch(epoch); }) dataset_->set_epoch(epoch);
  }
  const BatchOps& ops() const override { return batch_ops<Batch>; }

 protected:
  std::shared_ptr<D> dataset_;
};

template <class D, class Batch, class Collate> class MapSourceOf final : public SourceOf<MapSource, D, Batch> {
 public:
  MapSourceOf(std::shared_ptr<D> dataset, Collate collate)
      : SourceOf<MapSource, D, Batch>(std::move(dataset)), collate_(std::move(collate)) {}

  AnyBatch fetch(const Indices& indices) override { return any_batch(typed(indices)); }

 private:
  Batch typed(const Indices& indices) {
    D& dataset = *this->dataset_;
    if constexpr (LibTorchDataset<D>) {
      // int64_t and size_t may alias; indices are never negative.
      const c10::ArrayRef<size_t> request(reinterpret_cast<const size_t*>(indices.data()), indices.size());
      if constexpr (is_sample_list<Raw<D>>) return collate_(dataset.get_batch(request));
      else return dataset.get_batch(request);
    } else {
      Raw<D> samples;
      samples.reserve(indices.size());
      for (const int64_t index : indices) {
        if constexpr (HasGet<D>) samples.push_back(dataset.get(static_cast<size_t>(index)));
        else samples.push_back(dataset[static_cast<size_t>(index)]);
      }
      return collate_(std::move(samples));
    }
  }

  Collate collate_;
};

/// Reads a stream from its start, in whatever steps it gives its samples.
template <class D> class StreamReader {
 public:
  void rewind(D& dataset, const StreamPlan& plan) {
    if constexpr (CanShard<D>)
      if (plan.world_size > 1) dataset.shard(plan.rank, plan.world_size);
    if constexpr (requires { dataset.reset(); }) dataset.reset();
    given_ = 0;
  }

  /// The next list or batch of a LibTorch stream, of at most `chunk` samples; nothing at the end.
  std::optional<Raw<D>> request(D& dataset, int64_t chunk) requires LibTorchStream<D> {
    if constexpr (is_optional<decltype(dataset.get_batch(size_t{1}))>) {
      return dataset.get_batch(static_cast<size_t>(chunk));
    } else {
      // Such a stream has no end of its own: size() samples are one pass, or an empty batch ends it.
      const auto size = size_of(dataset);
      if (size) chunk = std::min(chunk, *size - given_);
      if (chunk <= 0) return std::nullopt;
      Raw<D> raw = dataset.get_batch(static_cast<size_t>(chunk));
      const int64_t rows = [&] {
        if constexpr (is_sample_list<Raw<D>>) return static_cast<int64_t>(raw.size());
        else return rows_of(raw);
      }();
      given_ += rows;
      if (rows == 0) return std::nullopt;
      return raw;
    }
  }

 private:
  int64_t given_ = 0;
};

/// A stream of samples.
template <class D, class Batch, class Collate>
class SampleStreamSource final : public SourceOf<StreamSource, D, Batch> {
  using Sample = typename Raw<D>::value_type;

 public:
  SampleStreamSource(std::shared_ptr<D> dataset, Collate collate)
      : SourceOf<StreamSource, D, Batch>(std::move(dataset)), collate_(std::move(collate)) {}
  bool can_shard() const override { return CanShard<D>; }

  void reset(const StreamPlan& plan, int64_t skip, const AtStep& at_step) override {
    stream_.rewind(*this->dataset_, plan);
    groups_.reset();
    buffer_.clear();
    leave_out(plan.skip_samples, plan.chunk);
    int64_t step = 0;
    if (skip > 0 && plan.complete) {  // the first group may be needed at the end
      at_step(step++);
      int64_t got = 0;
      groups_.read([&] { return next(plan.chunk); }, plan, got);
    }
    const int64_t at_once = requires(D & d) { d.skip(skip); }
    ? std::max<int64_t>(skip - step, 1) : 1;
    for (; step < skip; step += at_once) {
      at_step(step);
      leave_out(at_once * plan.group, plan.chunk);
    }
  }

  std::optional<LoadedBatch> read(const StreamPlan& plan) override {
    int64_t got = 0;
    auto samples = groups_.read([&] { return next(plan.chunk); }, plan, got);
    if (samples.empty()) return std::nullopt;
    Batch batch = collate_(std::move(samples));
    return LoadedBatch{any_batch(std::move(batch)), plan.drop_last ? -1 : got % plan.group};
  }

 private:
  void leave_out(int64_t samples, int64_t chunk) {
    if constexpr (requires(D & d) { d.skip(samples); }) {
      if (samples > 0) this->dataset_->skip(samples);
    } else {
      while (samples-- > 0 && next(chunk)) {
      }
    }
  }
  std::optional<Sample> next(int64_t chunk) {
    if constexpr (PlainStream<D>) {
      return this->dataset_->next();
    } else {
      if (buffer_.empty()) {
        auto raw = stream_.request(*this->dataset_, chunk);
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
  StreamReader<D> stream_;
  GroupReader<Sample> groups_;
  std::vector<Sample> buffer_;
};

/// A LibTorch stream whose transforms collate.
template <class D, class Batch> class BatchStreamSource final : public SourceOf<CollatedStreamSource, D, Batch> {
 public:
  using SourceOf<CollatedStreamSource, D, Batch>::SourceOf;
  bool can_shard() const override { return CanShard<D>; }

 protected:
  void rewind(const StreamPlan& plan) override { stream_.rewind(*this->dataset_, plan); }
  AnyBatch request(int64_t chunk) override {
    auto batch = stream_.request(*this->dataset_, chunk);
    if (!batch) return nullptr;
    return any_batch<Batch>(std::move(*batch));
  }

 private:
  StreamReader<D> stream_;
};

template <class Batch, class D, class Collate> auto make_source(std::shared_ptr<D> dataset, Collate collate) {
  if constexpr (!Stream<D>)
    return std::make_shared<MapSourceOf<D, Batch, Collate>>(std::move(dataset), std::move(collate));
  else if constexpr (is_sample_list<Raw<D>>)
    return std::make_shared<SampleStreamSource<D, Batch, Collate>>(std::move(dataset), std::move(collate));
  else return std::make_shared<BatchStreamSource<D, Batch>>(std::move(dataset));
}

}  // namespace accelerate::data::detail
