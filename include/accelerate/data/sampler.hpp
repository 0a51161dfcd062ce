#pragma once

/// Which samples in which order, and which rank gets them. Nothing here needs a process group: ranks and world sizes
/// are arguments.
///
/// A sampler is a recipe; `start()` begins one pass over it and returns a cursor, a function that gives one item per
/// call and nothing at the end. Passes are independent of each other. Samplers and cursors are used by one thread at a
/// time. Conformance: batch_sampler_shard*.json, skip_batches.json, seedable_random_sampler.json.

#include <ATen/core/Generator.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace torch::data::samplers {
template <class BatchRequest> class DistributedSampler;
}

namespace accelerate::data {

using Indices = std::vector<int64_t>;
template <class T> using Cursor = std::function<std::optional<T>()>;

namespace detail {
inline std::optional<at::Generator> if_defined(at::Generator generator) {
  return generator.defined() ? std::optional(std::move(generator)) : std::nullopt;
}
}  // namespace detail

/// The order of single samples. Derive from it to write your own.
class ACCELERATE_API AnySampler {
 public:
  virtual ~AnySampler() = default;
  /// Begins a pass. All random numbers of the pass are drawn here, from generator() where the sampler has one.
  virtual Cursor<int64_t> start() = 0;
  /// Samples in a pass, when known.
  virtual std::optional<int64_t> size() const { return std::nullopt; }
  /// Called before each pass of a prepared loader.
  virtual void set_epoch(int64_t /*epoch*/) {}
  /// True when the order is random, so that ranks must share a generator.
  virtual bool random() const { return false; }
  /// The generator that start() draws from; empty: LibTorch's default one.
  const std::optional<at::Generator>& generator() const { return generator_; }
  /// An undefined one: draw from LibTorch's default one again. Overriders keep the handle.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  void set_generator(at::Generator generator) { generator_ = detail::if_defined(std::move(generator)); }

 protected:
  std::optional<at::Generator> generator_;
};

/// 0, 1, ..., size - 1.
class ACCELERATE_API SequentialSampler : public AnySampler {
 public:
  explicit SequentialSampler(int64_t size) : size_(size) {}
  Cursor<int64_t> start() override;
  std::optional<int64_t> size() const override { return size_; }

 private:
  int64_t size_;
};

struct RandomSamplerOptions {
  /// Draw with replacement.
  bool replacement = false;
  /// Samples per pass; unset: the size of the data set. More than that without replacement means several permutations.
  std::optional<int64_t> num_samples = std::nullopt;
  /// Unset: each pass seeds a fresh generator from LibTorch's default one.
  std::optional<at::Generator> generator = std::nullopt;
};

/// A new random order in each pass: the same one as torch.utils.data.RandomSampler's for equal generator states.
class ACCELERATE_API RandomSampler : public AnySampler {
 public:
  explicit RandomSampler(int64_t data_size, RandomSamplerOptions options = {});
  Cursor<int64_t> start() override;
  std::optional<int64_t> size() const override { return options_.num_samples.value_or(data_size_); }
  bool random() const override { return true; }
  int64_t data_size() const { return data_size_; }
  const RandomSamplerOptions& options() const { return options_; }

 private:
  int64_t data_size_;
  RandomSamplerOptions options_;
};

/// A random order that depends on seed and epoch only: epoch e uses a generator seeded with seed + e. Each pass moves
/// on to the next epoch.
class ACCELERATE_API SeedableRandomSampler : public RandomSampler {
 public:
  /// @param data_seed unset: the initial seed of LibTorch's default generator.
  explicit SeedableRandomSampler(int64_t data_size, std::optional<int64_t> data_seed = std::nullopt,
                                 RandomSamplerOptions options = {});
  Cursor<int64_t> start() override;
  void set_epoch(int64_t epoch) override { epoch_ = epoch; }
  int64_t epoch() const { return epoch_; }

 private:
  int64_t initial_seed_;
  int64_t epoch_ = 0;
};

/// The order of batches of samples. Derive from it for batches of varying sizes (buckets, token budgets).
class ACCELERATE_API AnyBatchSampler {
 public:
  virtual ~AnyBatchSampler() = default;
  /// Begins a pass.
  virtual Cursor<Indices> start() = 0;
  /// Batches in a pass, when known.
  virtual std::optional<int64_t> size() const { return std::nullopt; }
  /// Size of a full batch; unset when batches vary by design.
  virtual std::optional<int64_t> batch_size() const { return std::nullopt; }
  /// A short last batch is left out.
  virtual bool drop_last() const { return false; }
  /// Samples in a pass before a short batch is dropped, when known.
  virtual std::optional<int64_t> num_samples() const { return std::nullopt; }
  virtual void set_epoch(int64_t /*epoch*/) {}
  virtual bool random() const { return false; }
  /// True when it gives one rank's part already, so that a prepared loader may not share it out again.
  virtual bool sharded() const { return false; }
  virtual std::optional<at::Generator> generator() const { return std::nullopt; }
  /// An undefined one: draw from LibTorch's default one again. Overriders keep the handle.
  // NOLINTNEXTLINE(performance-unnecessary-value-param)
  virtual void set_generator(at::Generator /*generator*/) {}
};

/// Consecutive samples of a sampler in batches of one size.
class ACCELERATE_API BatchSampler : public AnyBatchSampler {
 public:
  /// @throws ConfigError when batch_size < 1.
  BatchSampler(std::shared_ptr<AnySampler> sampler, int64_t batch_size, bool drop_last);
  Cursor<Indices> start() override;
  std::optional<int64_t> size() const override;
  std::optional<int64_t> batch_size() const override { return batch_size_; }
  bool drop_last() const override { return drop_last_; }
  std::optional<int64_t> num_samples() const override { return sampler_->size(); }
  void set_epoch(int64_t epoch) override { sampler_->set_epoch(epoch); }
  bool random() const override { return sampler_->random(); }
  std::optional<at::Generator> generator() const override { return sampler_->generator(); }
  void set_generator(at::Generator generator) override { sampler_->set_generator(std::move(generator)); }
  const std::shared_ptr<AnySampler>& sampler() const { return sampler_; }

 private:
  std::shared_ptr<AnySampler> sampler_;
  int64_t batch_size_;
  bool drop_last_;
};

namespace detail {
/// Forwards everything but the batches to another batch sampler.
class ACCELERATE_API BatchSamplerWrapper : public AnyBatchSampler {
 public:
  explicit BatchSamplerWrapper(std::shared_ptr<AnyBatchSampler> inner) : inner_(std::move(inner)) {}
  std::optional<int64_t> batch_size() const override { return inner_->batch_size(); }
  bool drop_last() const override { return inner_->drop_last(); }
  std::optional<int64_t> num_samples() const override { return inner_->num_samples(); }
  void set_epoch(int64_t epoch) override { inner_->set_epoch(epoch); }
  bool random() const override { return inner_->random(); }
  bool sharded() const override { return inner_->sharded(); }
  std::optional<at::Generator> generator() const override { return inner_->generator(); }
  void set_generator(at::Generator generator) override { inner_->set_generator(std::move(generator)); }

 protected:
  std::shared_ptr<AnyBatchSampler> inner_;
};
}  // namespace detail

struct ShardOptions {
  int64_t num_processes = 1;
  int64_t process_index = 0;
  /// true: every batch is cut in num_processes pieces. false: ranks take batches in turn.
  bool split_batches = false;
  /// Complete the last global batch with samples from the start, so that all ranks get equally many, equally long
  /// batches.
  bool even_batches = true;
};

/// One rank's part of a batch sampler.
///
/// With a batch size, even_batches repeats samples of the first num_processes batches; samplers without one (varying
/// sizes) repeat whole first batches. When `drop_last` is set, incomplete global batches are left out instead.
class ACCELERATE_API BatchSamplerShard : public detail::BatchSamplerWrapper {
 public:
  /// @throws ConfigError when split_batches is set and the batch size is unknown or no multiple of num_processes.
  BatchSamplerShard(std::shared_ptr<AnyBatchSampler> inner, const ShardOptions& options);
  Cursor<Indices> start() override;
  /// Batches of this rank; exact where the number of samples is known.
  std::optional<int64_t> size() const override;
  bool sharded() const override { return options_.num_processes > 1; }
  const ShardOptions& options() const { return options_; }

 private:
  ShardOptions options_;
};

/// Leaves out the first batches. Only index lists are skipped: no sample is read.
class ACCELERATE_API SkipBatchSampler : public detail::BatchSamplerWrapper {
 public:
  SkipBatchSampler(std::shared_ptr<AnyBatchSampler> inner, int64_t skip_batches)
      : BatchSamplerWrapper(std::move(inner)), skip_batches_(skip_batches) {}
  Cursor<Indices> start() override;
  std::optional<int64_t> size() const override;

 private:
  int64_t skip_batches_;
};

namespace detail {

/// The samples of another sampler but for the first ones.
class ACCELERATE_API SkipSampler final : public AnySampler {
 public:
  SkipSampler(std::shared_ptr<AnySampler> inner, int64_t skip_samples)
      : inner_(std::move(inner)), skip_samples_(skip_samples) {}
  Cursor<int64_t> start() override;
  std::optional<int64_t> size() const override;

 private:
  std::shared_ptr<AnySampler> inner_;
  int64_t skip_samples_;
};

/// While it lives, LibTorch's default CPU generator draws from `generator`'s stream; afterwards the default is as
/// before and `generator` has moved on.
class ACCELERATE_API DefaultGeneratorScope {
 public:
  explicit DefaultGeneratorScope(const std::optional<at::Generator>& generator);
  ~DefaultGeneratorScope();
  DefaultGeneratorScope(const DefaultGeneratorScope&) = delete;
  DefaultGeneratorScope& operator=(const DefaultGeneratorScope&) = delete;

 private:
  struct Saved;
  std::unique_ptr<Saved> saved_;
};

/// torch::data::samplers::*: `reset(optional<size_t>)` and `next(batch_size)`.
template <class S> concept LibTorchSampler = requires(S& s, size_t n) {
  s.reset(std::optional<size_t>());
  { *s.next(n) } -> std::convertible_to<std::vector<size_t>>;
};
/// Anything with `reset()` and `next()` that gives a list of indices.
template <class S> concept PlainBatchSampler = requires(S& s) {
  s.reset();
  { (*s.next())[0] } -> std::convertible_to<int64_t>;
};

/// @throws ConfigError: a pass of something that has one position only was asked for more after a later one began.
[[noreturn]] ACCELERATE_API void throw_pass_is_over(const char* of_what);

template <class S> class ForeignBatchSampler : public AnyBatchSampler {
 public:
  ForeignBatchSampler(std::shared_ptr<S> sampler, int64_t batch_size, bool drop_last, std::optional<int64_t> data_size)
      : sampler_(std::move(sampler)), batch_size_(batch_size), drop_last_(drop_last), data_size_(data_size) {}

  Cursor<Indices> start() override {
    {
      // Foreign samplers shuffle with the default generator when they are reset.
      const DefaultGeneratorScope scope(generator_);
      if constexpr (LibTorchSampler<S>) sampler_->reset(std::nullopt);
      else sampler_->reset();
    }
    return [sampler = sampler_, n = batch_size_, drop = drop_last_, latest = passes_,
            pass = ++*passes_]() -> std::optional<Indices> {
      if (pass != *latest) throw_pass_is_over("a sampler that is reset for each pass");
      const auto batch = [&] {
        if constexpr (LibTorchSampler<S>) return sampler->next(static_cast<size_t>(n));
        else return sampler->next();
      }();
      if (!batch) return std::nullopt;
      if (LibTorchSampler<S> && drop && static_cast<int64_t>(batch->size()) < n) return std::nullopt;
      return Indices(batch->begin(), batch->end());
    };
  }
  std::optional<int64_t> size() const override {
    if constexpr (LibTorchSampler<S>) {
      if (!data_size_) return std::nullopt;
      return drop_last_ ? *data_size_ / batch_size_ : (*data_size_ + batch_size_ - 1) / batch_size_;
    } else if constexpr (requires(const S& s) { static_cast<int64_t>(s.size()); }) {
      return static_cast<int64_t>(std::as_const(*sampler_).size());
    } else {
      return std::nullopt;
    }
  }
  std::optional<int64_t> batch_size() const override {
    if constexpr (LibTorchSampler<S>) return batch_size_;
    else if constexpr (requires(const S& s) { static_cast<int64_t>(s.batch_size()); })
      return static_cast<int64_t>(std::as_const(*sampler_).batch_size());
    else return std::nullopt;
  }
  bool drop_last() const override {
    if constexpr (requires(const S& s) { static_cast<bool>(s.drop_last()); })
      return std::as_const(*sampler_).drop_last();
    else return LibTorchSampler<S> && drop_last_;
  }
  std::optional<int64_t> num_samples() const override { return LibTorchSampler<S> ? data_size_ : std::nullopt; }
  void set_epoch(int64_t epoch) override {
    if constexpr (requires(S & s) { s.set_epoch(epoch); }) sampler_->set_epoch(epoch);
  }
  bool random() const override { return true; }  // who knows
  bool sharded() const override {
    return std::derived_from<S, torch::data::samplers::DistributedSampler<std::vector<size_t>>>;
  }
  std::optional<at::Generator> generator() const override { return generator_; }
  void set_generator(at::Generator generator) override { generator_ = if_defined(std::move(generator)); }

 private:
  std::shared_ptr<S> sampler_;
  std::shared_ptr<int64_t> passes_ = std::make_shared<int64_t>(0);
  int64_t batch_size_;
  bool drop_last_;
  std::optional<int64_t> data_size_;
  std::optional<at::Generator> generator_;
};

template <class T> struct Pointee {
  using type = T;
  static std::shared_ptr<T> share(T value) { return std::make_shared<T>(std::move(value)); }
};
template <class T> struct Pointee<std::shared_ptr<T>> {
  using type = T;
  static std::shared_ptr<T> share(std::shared_ptr<T> value) { return value; }
};
template <class T> struct Pointee<std::reference_wrapper<T>> {
  using type = T;
  static std::shared_ptr<T> share(std::reference_wrapper<T> value) {
    return std::shared_ptr<T>(&value.get(), [](T*) {});
  }
};

}  // namespace detail

/// A sampler that a loader accepts (also behind std::shared_ptr or std::ref): ours, LibTorch's, or any type with
/// `reset()` and `std::optional<std::vector<size_t or int64_t>> next()`, optionally `size()` (batches), `batch_size()`,
/// `drop_last()` and `set_epoch(e)`.
template <class S>
concept SamplerLike = std::derived_from<typename detail::Pointee<S>::type, AnySampler> ||
    std::derived_from<typename detail::Pointee<S>::type, AnyBatchSampler> ||
    detail::LibTorchSampler<typename detail::Pointee<S>::type> ||
    detail::PlainBatchSampler<typename detail::Pointee<S>::type>;

/// Any sampler as a batch sampler. batch_size and drop_last are for samplers that have none of their own.
template <SamplerLike S>
std::shared_ptr<AnyBatchSampler> as_batch_sampler(S sampler, int64_t batch_size, bool drop_last,
                                                  std::optional<int64_t> data_size = std::nullopt) {
  using T = typename detail::Pointee<S>::type;
  auto shared = detail::Pointee<S>::share(std::move(sampler));
  if constexpr (std::derived_from<T, AnyBatchSampler>) return shared;
  else if constexpr (std::derived_from<T, AnySampler>)
    return std::make_shared<BatchSampler>(shared, batch_size, drop_last);
  else return std::make_shared<detail::ForeignBatchSampler<T>>(shared, batch_size, drop_last, data_size);
}

}  // namespace accelerate::data
