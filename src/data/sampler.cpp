#include "accelerate/data/sampler.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randperm.h>

#include <algorithm>

#include "draws.hpp"
#include "utils/raise.hpp"

namespace accelerate::data {

int64_t draw_seed(const std::optional<at::Generator>& generator) {
  return at::empty({}, at::TensorOptions().dtype(at::kLong)).random_(generator).item<int64_t>();
}

at::Generator seeded_generator(int64_t seed) { return at::detail::createCPUGenerator(static_cast<uint64_t>(seed)); }

namespace {

void append(Indices& indices, const at::Tensor& tensor, int64_t count) {
  const auto* data = tensor.const_data_ptr<int64_t>();
  indices.insert(indices.end(), data, data + count);
}

/// `count` indices below `n`, drawn in the order in which torch.utils.data.RandomSampler draws them.
Indices random_order(int64_t n, int64_t count, bool replacement, const at::Generator& generator) {
  Indices order;
  order.reserve(static_cast<size_t>(count));
  const auto options = at::TensorOptions().dtype(at::kLong);
  constexpr int64_t kDrawsAtOnce = 32;  // as many as the reference draws per call: the stream of numbers depends on it
  while (n > 0 && replacement && static_cast<int64_t>(order.size()) < count) {
    const int64_t draws = std::min(count - static_cast<int64_t>(order.size()), kDrawsAtOnce);
    append(order, at::randint(n, {draws}, generator, options), draws);
  }
  // The reference draws a last permutation even when it needs none of it, which decides on the order of the next pass.
  for (int64_t left = count; n > 0 && !replacement && left >= 0; left -= n)
    append(order, at::randperm(n, generator, options), std::min(left, n));
  return order;
}

}  // namespace

Cursor<int64_t> SequentialSampler::start() {
  return [next = int64_t{0}, size = size_]() mutable -> std::optional<int64_t> {
    if (next >= size) return std::nullopt;
    return next++;
  };
}

RandomSampler::RandomSampler(int64_t data_size, RandomSamplerOptions options)
    : data_size_(data_size), options_(std::move(options)) {
  generator_ = options_.generator;
  if (options_.num_samples && *options_.num_samples < 0)
    raise<ConfigError>(
        "RandomSampler: num_samples is {}, expected 0 or more; leave it unset to draw as many as the data set has",
        *options_.num_samples);
}

Cursor<int64_t> RandomSampler::start() {
  const at::Generator generator = generator_ ? *generator_ : seeded_generator(draw_seed(std::nullopt));
  return [order = random_order(data_size_, *size(), options_.replacement, generator),
          next = size_t{0}]() mutable -> std::optional<int64_t> {
    if (next >= order.size()) return std::nullopt;
    return order[next++];
  };
}

SeedableRandomSampler::SeedableRandomSampler(int64_t data_size, std::optional<int64_t> data_seed,
                                             RandomSamplerOptions options)
    : RandomSampler(data_size, std::move(options)),
      initial_seed_(data_seed ? *data_seed
                              : static_cast<int64_t>(at::detail::getDefaultCPUGenerator().current_seed())) {}

Cursor<int64_t> SeedableRandomSampler::start() {
  if (!generator_) generator_ = seeded_generator(initial_seed_);
  generator_->set_current_seed(static_cast<uint64_t>(initial_seed_ + epoch_));
  ++epoch_;
  return RandomSampler::start();
}

BatchSampler::BatchSampler(std::shared_ptr<AnySampler> sampler, int64_t batch_size, bool drop_last)
    : sampler_(std::move(sampler)), batch_size_(batch_size), drop_last_(drop_last) {
  if (batch_size_ < 1) raise<ConfigError>("DataLoader: batch_size is {}, expected at least 1", batch_size_);
}

Cursor<Indices> BatchSampler::start() {
  return [next = sampler_->start(), n = batch_size_, drop = drop_last_]() -> std::optional<Indices> {
    Indices batch;
    batch.reserve(static_cast<size_t>(n));
    while (static_cast<int64_t>(batch.size()) < n) {
      const auto index = next();
      if (!index) break;
      batch.push_back(*index);
    }
    if (batch.empty() || (drop && static_cast<int64_t>(batch.size()) < n)) return std::nullopt;
    return batch;
  };
}

std::optional<int64_t> BatchSampler::size() const {
  const auto samples = sampler_->size();
  if (!samples) return std::nullopt;
  return drop_last_ ? *samples / batch_size_ : (*samples + batch_size_ - 1) / batch_size_;
}

Cursor<Indices> SkipBatchSampler::start() {
  return [next = inner_->start(), skip = skip_batches_]() mutable -> std::optional<Indices> {
    for (; skip > 0; --skip)
      if (!next()) return std::nullopt;
    return next();
  };
}

std::optional<int64_t> SkipBatchSampler::size() const {
  const auto all = inner_->size();
  if (!all) return std::nullopt;
  return std::max<int64_t>(*all - skip_batches_, 0);
}

namespace detail {

Cursor<int64_t> SkipSampler::start() {
  return [next = inner_->start(), skip = skip_samples_]() mutable -> std::optional<int64_t> {
    for (; skip > 0; --skip)
      if (!next()) return std::nullopt;
    return next();
  };
}

std::optional<int64_t> SkipSampler::size() const {
  const auto all = inner_->size();
  if (!all) return std::nullopt;
  return std::max<int64_t>(*all - skip_samples_, 0);
}

struct DefaultGeneratorScope::Saved {
  at::Generator default_generator;
  at::Generator generator;
  at::Tensor state;
};

DefaultGeneratorScope::DefaultGeneratorScope(const std::optional<at::Generator>& generator) {
  if (!generator) return;
  at::Generator usual = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(usual.mutex());
  saved_ = std::make_unique<Saved>(Saved{usual, *generator, usual.get_state()});
  usual.set_state(generator->get_state());
}

DefaultGeneratorScope::~DefaultGeneratorScope() {
  if (!saved_) return;
  const std::lock_guard lock(saved_->default_generator.mutex());
  saved_->generator.set_state(saved_->default_generator.get_state());
  saved_->default_generator.set_state(saved_->state);
}

}  // namespace detail
}  // namespace accelerate::data
